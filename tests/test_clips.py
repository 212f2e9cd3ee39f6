"""Clips' own arguments: what goes into a config, and what is refused."""

import json

import pytest

import tfdpfl
from tfdpfl.clips import AdaptiveClip, AutomaticClip, PerLayerClip

CLIPS = [AdaptiveClip(initial=0.3, target_quantile=0.4), AutomaticClip(0.7, 0.1), PerLayerClip(0.4),
         PerLayerClip([0.4, 1.0]), PerLayerClip({"a": 0.4})]  # fmt: skip


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_clips_go_through_a_config_and_json(clip):
    optimizer = tfdpfl.DPAdam(clip, 1.0, rows_per_unit=4)
    config = json.loads(json.dumps(optimizer.get_config()["l2_norm_clip"]))
    again = tfdpfl.DPAdam.from_config({**optimizer.get_config(), "l2_norm_clip": config})
    assert again.l2_norm_clip == clip and again.rows_per_unit == 4


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: AutomaticClip(0.0), "l2_norm_clip"),
        (lambda: AutomaticClip(1.0, -1), "stability"),
        (lambda: PerLayerClip([]), "no clip"),
        (lambda: PerLayerClip([1.0, -1.0]), "clips"),
        (lambda: tfdpfl.DPSGD(AdaptiveClip(clipped_count_stddev=0.4), 1.0), "clipped_count_stddev=0.4"),
        (lambda: tfdpfl.DPSGD(AdaptiveClip(initial=1e-11), 1.0), "so small"),
        (lambda: tfdpfl.DPSGD(1.0, 1.0, rows_per_unit=0), "rows_per_unit=0"),
        (lambda: tfdpfl.DPSGD(1.0, 1.0, num_microbatches=2, rows_per_unit=2), "num_microbatches=2"),
        (lambda: PerLayerClip({"a": 1.0, "b": 1.0}).groups(["a/b/kernel"]), "several names fit the weight"),
    ],
)
def test_clips_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
