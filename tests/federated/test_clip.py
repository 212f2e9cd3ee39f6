"""The noise of an adaptive clip's count is charged, and bounds out of range are refused."""

import pytest

from tfdpfl import AdaptiveClip
from tfdpfl.federated.clip import NoisedMetrics, combined


def test_the_count_of_an_adaptive_clip_is_charged_and_safe_for_small_cohorts():
    for cohort in (1, 3, 20, 100, 5000):
        of_updates, of_count = AdaptiveClip().split(1.2, cohort)
        assert combined(of_updates, 2 * of_count) == pytest.approx(1.2)
        assert of_updates <= 1.155 * 1.2
    assert AdaptiveClip().split(1.2, 5000)[1] == 250
    with pytest.raises(ValueError, match=r"clipped_count_stddev=0\.5 is at most half of noise_multiplier=1\.2"):
        AdaptiveClip(clipped_count_stddev=0.5).split(1.2, 100)
    assert AdaptiveClip().split(0.0, 10) == (0.0, 0.0)


@pytest.mark.parametrize(
    "wrong", [{"initial": 0.0}, {"target_quantile": 1.0}, {"learning_rate": -1.0}, {"clipped_count_stddev": -1.0}]
)
def test_adaptive_clips_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdaptiveClip(**wrong)


def test_metrics_out_of_range_are_refused():
    with pytest.raises(ValueError, match="noise_multiplier"):
        NoisedMetrics(noise_multiplier=0.0)
    with pytest.raises(ValueError, match="bound"):
        NoisedMetrics(noise_multiplier=1.0, bound={"loss": -1.0})
    with pytest.raises(ValueError, match="must name a metric"):
        NoisedMetrics(noise_multiplier=1.0, bound={})
    with pytest.raises(ValueError, match="a bound of 1 for 'contributing'"):
        NoisedMetrics(noise_multiplier=1.0, bound={"loss": 2.0, "contributing": 2.0})


def test_one_bound_is_of_all_of_the_models_own_metrics_and_noise_is_spent_on_those_alone():
    names = ["loss", "accuracy", "num_examples", "num_batches"]  # the last two are TFF's
    assert NoisedMetrics(noise_multiplier=1.0, bound=3.0).bounds(names) == {"loss": 3.0, "accuracy": 3.0}
    asked = {"num_examples": 40.0, "contributing": 1.0}
    assert NoisedMetrics(noise_multiplier=1.0, bound=asked).bounds(names) == asked
