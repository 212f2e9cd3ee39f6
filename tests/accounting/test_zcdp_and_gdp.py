"""Reports say the same in the terms of zCDP, GDP and an attacker's hits."""

import pytest
from accounting_cases import RUN
from scipy import optimize, special

from tfdpfl.accounting import privacy_report


@pytest.mark.parametrize("sampling", ["shuffle", "poisson"])
def test_reports_say_the_same_in_other_terms(sampling):
    """Against the best test between the two outputs of one step."""
    sigma, rate = 1.25, 1.0 if sampling == "shuffle" else 0.3
    data = dict(num_examples=1000, batch_size=300)
    report = privacy_report(**data, noise_multiplier=sigma, num_steps=1, delta=1e-5, sampling=sampling)
    threshold = special.ndtri(0.99)
    best = (1 - rate) * 0.01 + rate * special.ndtr(1 / sigma - threshold)
    # And where the sampled example is in the data of the hypothesis: small values tell of its absence.
    wrong = lambda t: (1 - rate) * special.ndtr(t) + rate * special.ndtr(t - 1 / sigma) - 0.01
    best = max(best, special.ndtr(optimize.brentq(wrong, -9, 0)))
    rho, mu, tpr = report.others
    if sampling == "shuffle":
        assert (rho, mu) == pytest.approx((1 / (2 * sigma**2), 1 / sigma))
        assert tpr == pytest.approx(best, rel=1e-9)
        assert "zCDP rho = 0.32, GDP mu = 0.8" in report.statement()
    else:
        assert rho is mu is None and best <= tpr <= 1.25 * best
    assert f"finds at most {100 * tpr:.2f}"[:-1] in report.statement()
    assert report.to_dict()["tpr_at_1_percent_fpr"] == tpr and "event" not in report.to_dict()
    assert privacy_report(**RUN, num_steps=0).others == (0, 0, pytest.approx(0.01))
    assert privacy_report(**{**RUN, "noise_multiplier": 0.0}, num_steps=5).others.tpr_at_1_percent_fpr == 1
