"""Computes the cost of training: any one of ε, σ, steps and batch size from the others.

It also has reports in English and JSON, and a ledger of what ran.

Every figure goes one way: what ran is a dp-accounting event (`Run.dp_event`, `PrivacyLedger.dp_event`), and
`price` turns an event into ε. Nothing here imports TensorFlow, and dp-accounting is loaded by the first
price.
"""

from tfdpfl.accounting.calibration import (
    compute_batch_size,
    compute_epsilon,
    compute_noise_multiplier,
    compute_num_steps,
)
from tfdpfl.accounting.ledger import PrivacyLedger
from tfdpfl.accounting.pricing import ACCOUNTANTS, Price, price
from tfdpfl.accounting.report import PrivacyReport, privacy_report, privacy_statement
from tfdpfl.accounting.run import ADJACENCIES, SAMPLINGS, Run

__all__ = [
    "ACCOUNTANTS",
    "ADJACENCIES",
    "SAMPLINGS",
    "Price",
    "PrivacyLedger",
    "PrivacyReport",
    "Run",
    "compute_batch_size",
    "compute_epsilon",
    "compute_noise_multiplier",
    "compute_num_steps",
    "price",
    "privacy_report",
    "privacy_statement",
]
