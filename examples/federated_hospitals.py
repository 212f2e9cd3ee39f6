"""Three hospitals train one model of heart disease without sharing a record, each by DP-SGD on its own patients.

    python examples/federated_hospitals.py                    # the balanced preset
    python examples/federated_hospitals.py --preset strong    # or high_utility, or all

The patients are synthetic. The program prints the sampling rate and the noise of each hospital, then one line for
each hospital and round (loss, steps, ε so far). A table shows ε, the rest of the budget, and how well a membership
attack tells patients from others, compared with a model without privacy. Two experiments show accuracy against ε for
several noise multipliers and several sampling rates. The picture shows accuracy, compared with a constant answer, and
ε over the rounds.
"""

from __future__ import annotations

import argparse
import os
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from tfdpfl import plots
from tfdpfl.audit import membership_inference
from tfdpfl.federated import (
    BoundedParticipationSampler,
    RoundsRun,
    build_example_dp_fed_avg,
    local_runtime,
    train,
)
from tfdpfl.federated import data as fd

DELTA = 1e-5
HOSPITALS = {"Edinburgh Hospital": 70, "Clydebank Infirmary": 80, "Orkney Hospital": 90}


class Preset(NamedTuple):
    noise_multiplier: float
    sampling_rate: float
    local_epochs: int
    rounds: int


PRESETS = {
    "balanced": Preset(2.5, 0.15, 4, 2),
    "strong": Preset(3.0, 0.10, 3, 2),
    "high_utility": Preset(2.0, 0.20, 5, 3),
}


def make_patients(number: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Age, cholesterol, blood pressure, pulse, hours of exercise and body mass, all tied to age; whoever is among the
    30 % at the highest risk, a noisy sum of them, is ill."""
    age = rng.normal(55, 15, number).clip(20, 90)
    cholesterol = (150 + 2 * age + rng.normal(0, 30, number)).clip(120, 350)
    pressure = (90 + 0.8 * age + 0.1 * cholesterol + rng.normal(0, 15, number)).clip(90, 200)
    pulse = (85 - 0.2 * age + rng.normal(0, 10, number)).clip(50, 120)
    exercise = np.maximum(0, 8 - 0.05 * age + rng.normal(0, 3, number))
    mass = (22 + 0.1 * age - 0.3 * exercise + rng.normal(0, 4, number)).clip(16, 45)
    risk = 0.03 * age + 0.01 * cholesterol + 0.02 * pressure - 0.05 * exercise + 0.1 * mass + rng.normal(0, 2, number)
    columns = np.column_stack([age, cholesterol, pressure, pulse, exercise, mass])
    return columns, (risk > np.quantile(risk, 0.7)).astype(np.int32)


def split_over_hospitals(x: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Each hospital has its own kind of patients: the young or fit, those in mid life, the old or hypertensive.

    Returns the rows of its patients, and those of strangers of the same kind, for a fair attack.
    """
    kinds = [(x[:, 0] < 50) | (x[:, 4] > 5), (x[:, 0] >= 40) & (x[:, 0] <= 65), (x[:, 0] > 55) | (x[:, 2] > 140)]
    free = np.ones(len(x), bool)
    patients = {}
    for (hospital, beds), kind in zip(HOSPITALS.items(), kinds, strict=True):
        patients[hospital] = np.flatnonzero(kind & free)[:beds]
        free[patients[hospital]] = False
    return patients, {name: np.flatnonzero(kind & free) for name, kind in zip(HOSPITALS, kinds, strict=True)}


def make_model() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential([tf.keras.Input((6,)), layers.Dense(16, activation="tanh"), layers.Dense(2)])


def cross_entropy() -> tf.keras.losses.Loss:
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Study:
    """The data, and one training for each way to set the mechanism."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        x, y = make_patients(900, rng)
        patients, alike = split_over_hospitals(x)
        # Means and deviations of the patients would be a release of their own: public guesses do as well.
        x = ((x - [55, 260, 155, 74, 5, 26]) / [15, 40, 20, 10, 3, 4]).astype(np.float32)
        self.members = {hospital: (x[rows], y[rows]) for hospital, rows in patients.items()}
        strangers = np.setdiff1d(np.arange(len(x)), np.concatenate(list(patients.values())))
        self.strangers = x[strangers], y[strangers]
        self.non_members = {hospital: (x[rows], y[rows]) for hospital, rows in alike.items()}
        self.clients = fd.from_partition((x, y), patients)

    def without_privacy(self, epochs: int) -> tf.keras.Model:
        """All records in one place."""
        model = make_model()
        model.compile(tf.keras.optimizers.Adam(0.02), cross_entropy())
        x, y = (np.concatenate(part) for part in zip(*self.members.values(), strict=True))
        model.fit(x, y, batch_size=16, epochs=epochs, verbose=0)
        return model

    def batch_size(self, preset: Preset) -> int:
        """One for all hospitals, so that each has a sampling rate of its own."""
        return round(preset.sampling_rate * np.mean([len(y) for _, y in self.members.values()]))

    def train(self, preset: Preset, repeats: int = 1, shown: bool = False):
        """Returns models trained by DP-SGD at the hospitals, the last one's history, and each hospital's ε after each
        round."""
        batch = self.batch_size(preset)
        clients = self.clients.batch(batch)
        process = build_example_dp_fed_avg(
            make_model,
            l2_norm_clip=1.0,
            noise_multiplier=preset.noise_multiplier,
            batch_size=batch,
            local_steps=round(preset.local_epochs / preset.sampling_rate),
            client_optimizer_fn="momentum",
            loss=cross_entropy(),
            input_spec=clients.element_spec,
        )
        # Every hospital is in every round.
        sampler = BoundedParticipationSampler(clients.client_ids, len(clients), preset.rounds)
        (level,) = process.privacy
        sizes, everyone = clients.num_examples, [list(self.members)]
        # Known beforehand, since who takes part and how often does not hang on anyone's data.
        spent = [
            level.price_by_client(
                RoundsRun(
                    rounds=r, participation=sampler.participation, cohorts=everyone * r, num_examples=sizes
                ),
                DELTA, "pld" if shown else "rdp",
            )
            for r in range(1, preset.rounds + 1)
        ]  # fmt: skip
        spent = [{hospital: price.epsilon for hospital, price in row.items()} for row in spent]
        rounds = enumerate(spent, start=1)

        def show(weights) -> dict[str, float]:
            """What each hospital may tell itself: the loss on its own patients is for its eyes alone."""
            judge, (done, epsilons) = self.judge(weights), next(rounds)
            for hospital, (x, y) in self.members.items():
                print(f"  round {done}  {hospital:<20} loss {judge.evaluate(x, y, verbose=0):.3f}   "
                      f"steps {done * level.local_steps:>3}   q {batch / len(y):.2f}   σ {preset.noise_multiplier:g}   "
                      f"ε {epsilons[hospital]:.2f}", flush=True)  # fmt: skip
            return {}

        models = []
        for _ in range(repeats):
            history = train(
                process, clients, num_rounds=preset.rounds, sampler=sampler, delta=DELTA, progress=False,
                accountant="pld" if shown else "rdp", eval_fn=show if shown else None,
            )  # fmt: skip
            models.append(self.judge(process.get_model_weights(history.state)))
        return models, history, spent

    def judge(self, weights) -> tf.keras.Model:
        model = make_model()
        weights.assign_weights_to(model)
        model.compile(loss=cross_entropy())
        return model

    def accuracy(self, model: tf.keras.Model) -> float:
        x, y = self.strangers
        return float(np.mean(model.predict(x, verbose=0).argmax(1) == y))

    def attacks(self, model: tf.keras.Model):
        return {
            hospital: membership_inference(model, own, self.non_members[hospital])
            for hospital, own in self.members.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=[*PRESETS, "all"], default="balanced")
    parser.add_argument("--budget", type=float, default=5.0, help="the ε that each hospital is willing to spend")
    parser.add_argument("--repeats", type=int, default=3, help="trainings to average in the experiments")
    parser.add_argument("--seed", type=int, default=0, help="of patients and plain models; noise stays secret")
    parser.add_argument("--output", default="federated_hospitals.png", help="the picture to write")
    parser.add_argument("--quick", action="store_true", help="the preset alone, without the two experiments")
    arguments = parser.parse_args()

    tf.keras.utils.set_random_seed(arguments.seed)
    study = Study(arguments.seed)
    accuracy = {}
    constant = float(max(np.mean(study.strangers[1]), 1 - np.mean(study.strangers[1])))
    accuracy[PLAIN] = study.accuracy(study.without_privacy(epochs=15))
    by_heart = study.without_privacy(epochs=20 if arguments.quick else 150)  # what an attack feeds on
    plain_attacks = study.attacks(by_heart)
    spent_by = {}
    with local_runtime():
        for name in list(PRESETS) if arguments.preset == "all" else [arguments.preset]:
            preset = PRESETS[name]
            batch = study.batch_size(preset)
            print(f"\n{name}: {preset.rounds} rounds of {preset.local_epochs} local epochs")
            for hospital, (_, ill) in study.members.items():
                print(f"  {hospital:<20} {len(ill)} patients, {np.mean(ill):.0%} ill, batch {batch}, "
                      f"sampling rate {batch / len(ill):.2f}, σ {preset.noise_multiplier:g}")  # fmt: skip
            (model,), history, spent_by[name] = study.train(preset, shown=True)
            attacks, spent = study.attacks(model), spent_by[name][-1]
            accuracy[name] = study.accuracy(model)
            left_of = f"left of {arguments.budget:g}"
            print(f"\n{'':<22}{'ε spent':>9}{left_of:>11}  membership AUC (95 % interval)")
            for hospital, report in attacks.items():
                low, high = report.auc_interval
                left = max(0.0, arguments.budget - spent[hospital])
                print(f"{hospital:<22}{spent[hospital]:>9.3f}{left:>11.3f}  {report.auc:.3f} [{low:.3f}, {high:.3f}], "
                      f"without privacy {plain_attacks[hospital].auc:.3f}")  # fmt: skip
            print(f"accuracy on strangers {accuracy[name]:.1%}; the constant answer {constant:.1%}; without privacy "
                  f"{accuracy[PLAIN]:.1%} after 15 passes, {study.accuracy(by_heart):.1%} by heart, as when "
                  "attacked")  # fmt: skip
            print(history.statement())
        if not arguments.quick:
            experiments(study, arguments.repeats)
    print("\nRules of thumb for ε: to 3 is strong, 5 to 10 moderate, above 10 weak. What is right is for those to say "
          "whose data it is.")  # fmt: skip

    try:
        draw(arguments.output, accuracy, constant, spent_by, arguments.budget)
    except ImportError as error:
        print(f"\nNo picture: {error}")
        return
    print(f"\nAccuracy, and ε over the rounds: {arguments.output}")


PLAIN = "without\nprivacy"


def experiments(study: Study, repeats: int) -> None:
    """Accuracy against ε, over the noise multiplier and over the sampling rate."""
    base = PRESETS["balanced"]
    varied = [
        *(base._replace(noise_multiplier=sigma) for sigma in (1.5, 2.5, 3.5)),
        *(base._replace(sampling_rate=rate) for rate in (0.1, 0.25, 0.5)),
    ]
    print(f"\nExperiments, accuracy the mean of {repeats}\n{'σ':>6}{'rate':>7}{'largest ε':>11}{'accuracy':>10}")
    for preset in varied:
        models, _, spent = study.train(preset, repeats)
        reached = float(np.mean([study.accuracy(model) for model in models]))
        print(f"{preset.noise_multiplier:>6g}{preset.sampling_rate:>7g}{max(spent[-1].values()):>11.3f}{reached:>10.1%}",
              flush=True)  # fmt: skip


def draw(output, accuracy, constant, spent_by, budget) -> None:
    first, second = plots.panels(2)
    bars = first.bar(list(accuracy), list(accuracy.values()), 0.5, color=["0.6", *["C0"] * (len(accuracy) - 1)])
    first.bar_label(bars, [f"{value:.0%}" for value in accuracy.values()], padding=2)
    first.axhline(constant, color="C3", linestyle="--", label=f"always the same answer: {constant:.0%}")
    first.set(ylim=(0, 1), ylabel="accuracy on strangers")
    gains = [value - constant for name, value in accuracy.items() if name != PLAIN]
    verdict = "beats" if min(gains) > 0 else "does not beat"
    first.set_title(f"Privacy {verdict} the same answer for all, by {100 * abs(min(gains)):.0f} points")
    first.legend(loc="upper right")
    name, spent = next(iter(spent_by.items()))
    for hospital, (marker, beds) in zip(HOSPITALS, zip("os^", HOSPITALS.values(), strict=True), strict=True):
        epsilons = [0.0, *(row[hospital] for row in spent)]
        second.plot(range(len(spent) + 1), epsilons, marker=marker, label=f"{hospital}, {beds} patients")
    second.axhline(budget, color="C3", linestyle="--", label=f"budget: {budget:g}")
    top = 1.25 * max(budget, *spent[-1].values())
    for low, high, shade, word in ((0, 3, 0.12, "strong"), (3, 10, 0.05, "moderate"), (10, top, 0.0, "weak")):
        if low < top:
            second.axhspan(low, min(high, top), color="C2", alpha=shade, linewidth=0)
            second.text(0.99, low + 0.02 * top, f"{word} privacy", transform=second.get_yaxis_transform(), ha="right",
                        color="0.4")  # fmt: skip
    second.set(xlabel="round", ylabel="ε of one patient", ylim=(0, top), xticks=range(len(spent) + 1))
    within = max(spent[-1].values()) <= budget
    second.set_title(f"{name}: the smallest hospital pays most, {'within' if within else 'above'} its budget")
    second.legend(loc="center left", bbox_to_anchor=(0.0, 0.6))
    first.figure.savefig(output, dpi=150)


if __name__ == "__main__":
    main()
