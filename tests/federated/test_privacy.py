"""What a federation guarantees at each level, and for which rounds."""

import types

from report_cases import DELTA

from tfdpfl.audit import report


def test_federated_promises_are_told_by_level():
    from tfdpfl.federated.guarantees import ClientLevel, DistributedLevel, LocalLevel
    from tfdpfl.federated.privacy import Participation, RoundsRun, promises_of_levels

    run = RoundsRun(rounds=3, participation=Participation(sampling="none", population=50, clients_per_round=10),
                    cohorts=[[f"c{i}" for i in range(10)]] * 3)  # fmt: skip
    client, local = ClientLevel(noise_multiplier=4.0), LocalLevel(noise_multiplier=8.0)
    trainings = {"client": (client, run), "local": (local, run)}
    history = types.SimpleNamespace(promises=lambda delta: promises_of_levels(trainings, lost_rounds=2))
    skellam = DistributedLevel(l1=100.0, l2=20.0, local_stddev=40.0)
    made = report({"fed": history, "sum": (skellam, run)}, delta=DELTA)
    prices = [client.price(run, DELTA).epsilon, local.price(run, DELTA).epsilon, skellam.price(run, DELTA).epsilon]
    assert [part.figures.epsilon for part in made.parts] == prices
    assert [part.unit for part in made.parts] == ["client", "client's update", "client"]
    together = next(total for total in made.totals if len(total.parts) == 2).figures.epsilon
    assert together == client.price(run, DELTA / 2).epsilon + skellam.price(run, DELTA / 2).epsilon
    assert any("2 more rounds" in warning for warning in made.warnings)


def test_what_is_stated_names_cohorts_of_a_seed_that_someone_knows():
    from tfdpfl.federated.guarantees import ClientLevel
    from tfdpfl.federated.privacy import KNOWN_COHORTS, Participation, RoundsRun, promises_of_levels

    drawn = Participation(sampling="poisson", population=50, clients_per_round=10)
    pair = ClientLevel(noise_multiplier=1.0), RoundsRun(rounds=1, participation=drawn)
    (told,) = promises_of_levels({"client": pair}, seeded=True)
    assert told.warnings == [KNOWN_COHORTS]
    assert not promises_of_levels({"client": pair})[0].warnings
