"""PATE: teachers that hold private data label a student's examples by noisy votes.

    teachers = TeacherEnsemble(model_fn, num_teachers=100).fit(x_private, y_private)
    flow = PATE(teachers, ConfidentGNMax(60, 40, 15), student_fn, delta=1e-5).fit(x_public)
    print(flow.report())

Or the steps by themselves: aggregators (`LNMax`, `GNMax`, `ConfidentGNMax`, `InteractiveGNMax`) answer votes, and
`rdp_data_dependent`, `rdp_data_independent` and `smooth_sensitivity_release` say what that costs. Sources: Papernot et
al. 2017 (arXiv:1610.05755) and 2018 (arXiv:1802.08908). TensorFlow is imported when teachers or students are.
"""

from tfdpfl.pate.aggregators import Aggregator, Answers, ConfidentGNMax, GNMax, InteractiveGNMax, LNMax
from tfdpfl.pate.analysis import (
    PySyftAnalysis,
    optimal_order,
    pysyft_analysis,
    rdp_data_dependent,
    rdp_data_independent,
)
from tfdpfl.pate.epsilon import Epsilon
from tfdpfl.pate.flow import PATE, PATEReport
from tfdpfl.pate.pricing import compose, epsilon_of_rdp
from tfdpfl.pate.sensitivity import (
    SanitizedEpsilon,
    published_release_cost,
    release_cost,
    smooth_sensitivity,
    smooth_sensitivity_release,
)
from tfdpfl.pate.teachers import TeacherEnsemble
from tfdpfl.pate.votes import as_counts

__all__ = [
    "PATE",
    "Aggregator",
    "Answers",
    "ConfidentGNMax",
    "Epsilon",
    "GNMax",
    "InteractiveGNMax",
    "LNMax",
    "PATEReport",
    "PySyftAnalysis",
    "SanitizedEpsilon",
    "TeacherEnsemble",
    "as_counts",
    "compose",
    "epsilon_of_rdp",
    "optimal_order",
    "published_release_cost",
    "pysyft_analysis",
    "rdp_data_dependent",
    "rdp_data_independent",
    "release_cost",
    "smooth_sensitivity",
    "smooth_sensitivity_release",
]
