"""The command line, `tfdpfl`: a demo, and the three unknowns of a DP-SGD run from each other.

Only `demo` needs TensorFlow. Everything but click is imported by the command that uses it, so that `--help`
comes at once.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from tfdpfl._cli_parts import DELTA, JSON, BadArgument, NewFile, clean_errors
from tfdpfl._ledger_cli import ledger
from tfdpfl._types import Keywords
from tfdpfl._version import __version__
from tfdpfl.accounting import ACCOUNTANTS, ADJACENCIES, SAMPLINGS
from tfdpfl.accounting.sampling import POISSON

if TYPE_CHECKING:
    from tfdpfl.accounting import PrivacyReport

__all__ = ["main"]

_NUM_EXAMPLES = click.option("--num-examples", type=int, required=True, help="Number of training examples.")
_BATCH_SIZE = click.option(
    "--batch-size", type=int, required=True, help="Batch size. With Poisson sampling, the expected one."
)
_NOISE = click.option(
    "--noise-multiplier", type=float, required=True, help="Standard deviation of the noise, divided by the clip."
)
_LENGTH = (
    click.option("--num-epochs", type=float, help="Passes over the data. Pass this or --num-steps."),
    click.option("--num-steps", type=int, help="Number of noisy updates."),
)
_TARGET = click.option("--target-epsilon", type=float, required=True, help="The largest epsilon that you accept.")
_HOW = (
    click.option(
        "--sampling",
        type=click.Choice(SAMPLINGS, case_sensitive=False),
        default=POISSON.name,
        show_default=True,
        help="How batches are drawn. fit shuffles arrays.",
    ),
    click.option("--num-microbatches", type=int, help="Number of groups whose mean gradient is clipped."),
    click.option(
        "--adjacency",
        type=click.Choice(ADJACENCIES, case_sensitive=False),
        help="Which data sets are neighbours. Default: depends on the sampling.",
    ),
    click.option(
        "--max-examples-per-user",
        type=int,
        default=1,
        show_default=True,
        help="The largest number of examples of one user.",
    ),
    click.option(
        "--secure-noise", is_flag=True, help="The optimizer has secure_noise=True, which draws discrete noise."
    ),
    click.option(
        "--accountant",
        type=click.Choice(ACCOUNTANTS, case_sensitive=False),
        default="pld",
        show_default=True,
    ),
    JSON,
)


def _options(*options: Callable) -> Callable:
    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tfdpfl")
def main() -> None:
    """Compute the privacy of a training, audit claims, and combine reports."""


main.add_command(ledger)


@main.command()
@_options(_NUM_EXAMPLES, _BATCH_SIZE, _NOISE, DELTA, *_LENGTH, *_HOW)
def epsilon(as_json: bool, **run: object) -> None:
    """Compute the epsilon of a run."""
    _print(_report(run), as_json, lambda report: f"epsilon = {_up(report.epsilon)}")


@main.command()
@_options(_TARGET, _NUM_EXAMPLES, _BATCH_SIZE, DELTA, *_LENGTH, *_HOW)
def noise(as_json: bool, target_epsilon: float, **run: Any) -> None:
    """Find the smallest noise multiplier that keeps a run within a target epsilon."""
    from tfdpfl.accounting import compute_noise_multiplier

    with clean_errors():
        run["noise_multiplier"] = compute_noise_multiplier(target_epsilon=target_epsilon, **run)
    _print(_report(run), as_json, lambda report: f"noise multiplier = {_up(report.noise_multiplier)}")


@main.command()
@_options(_TARGET, _NUM_EXAMPLES, _BATCH_SIZE, _NOISE, DELTA, *_HOW)
def steps(as_json: bool, target_epsilon: float, **run: Any) -> None:
    """Find the largest number of steps within a target epsilon."""
    from tfdpfl.accounting import compute_num_steps

    with clean_errors():
        run["num_steps"] = compute_num_steps(target_epsilon=target_epsilon, **run)
    _print(_report(run), as_json, lambda report: f"steps = {report.steps}")


@main.command()
@_options(_NUM_EXAMPLES, _BATCH_SIZE, _NOISE, DELTA, *_LENGTH, *_HOW)
def statement(as_json: bool, **run: object) -> None:
    """Print what a run guarantees, and what it assumes, in English."""
    _print(_report(run), as_json, str)


@main.command()
@click.option("--federated", is_flag=True, required=True, help="Plan a federation. Other trainings: tfdpfl.plan.")
@click.option("--population", type=int, required=True, help="Number of clients.")
@click.option(
    "--unit",
    type=click.Choice(["client", "example"]),
    default="client",
    show_default=True,
    help="What is protected: clients, by noise at the server, or examples, by DP-SGD at each client.",
)
@click.option("--target-epsilon", type=float, help="The largest epsilon. Pass two of this and the next two.")
@click.option("--noise-multiplier", type=float, help="Standard deviation of the noise, divided by the clip.")
@click.option("--num-rounds", type=int, help="Number of rounds.")
@click.option("--sampling-rate", type=float, help="Probability that a client is in a round. Pass this or the next.")
@click.option("--clients-per-round", type=int, help="Fixed number of clients in a round.")
@click.option("--max-participations", type=int, help="Most rounds of a client, with --clients-per-round.")
@click.option("--min-separation", type=int, default=1, help="Fewest rounds from one to the next of a client.")
@click.option("--local-steps", type=int, help="Steps of a client in a round, for examples.")
@click.option("--batch-size", type=int, help="Expected batch of a step, for examples.")
@click.option("--num-examples", type=int, help="Examples of the smallest client, for examples.")
@click.option("--delta", type=float, required=True, help="Delta, below 1 divided by the number of units.")
@click.option("--accountant", type=click.Choice(ACCOUNTANTS), default="pld", show_default=True)
@JSON
def plan(federated: bool, as_json: bool, **run: Any) -> None:
    """Plan the noise, the rounds or the epsilon of a federation.

    Prints the arguments of the strategy, or of the clients; --json prints them as an object, "arguments".
    """
    from tfdpfl.federated.plans import plan_federation

    with clean_errors():
        _print(plan_federation(**run), as_json, str)


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@_options(DELTA)
@click.option("--title", default="Privacy report", show_default=True, help="Name of the project.")
@click.option(
    "--unit", "units", multiple=True, metavar="FILE=UNIT", help="What a ledger that contains only events protects."
)
@click.option("--html", "page", type=NewFile(), help="HTML page to write.")
@JSON
def report(
    files: tuple[str, ...], delta: float, title: str, units: tuple[str, ...], page: str | None, as_json: bool
) -> None:
    """Combine ledgers into one report.

    Each FILE is JSON from PrivacyLedger.to_dict. All ledgers are assumed to use the same data. Each part has the name
    of its file without the ending.
    """
    from tfdpfl.reports import read, report

    said = dict(map(_unit, units))
    with clean_errors():
        made = report(read(files), delta=delta, title=title, units=said)
        click.echo(made.to_json() if as_json else str(made))
        if page is not None:
            made.to_html(page)


@main.command()
@click.argument("scores", type=click.Path(exists=True, dir_okay=False))
@click.option("--delta", type=float, help="Delta of the bound and of the claim.")
@click.option("--epsilon", "claim", type=float, help="Claimed epsilon, to be tested.")
@click.option("--ledger", type=click.Path(exists=True, dir_okay=False), help="Ledger whose epsilon is the claim.")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Confidence of the bound.")
@click.option("--gaussian", is_flag=True, help="The mechanism only adds Gaussian noise. Test with its larger bound.")
@click.option("--one-training-each", is_flag=True, help="Each score comes from a training of its own.")
@JSON
def audit(scores: str, delta: float | None, claim: float | None, ledger: str | None, as_json: bool, **how: Any) -> None:
    """Bound epsilon from below by the SCORES of an attack.

    SCORES is an .npz with the arrays scores and inserted (canaries that a coin put in or left out), or members and
    non_members; or a .csv whose first line is score,inserted or score,member. A higher score means that the example is
    more likely a member. The bound is for one example more or less. The exit code is 1 if the bound refutes the claim.
    """
    from tfdpfl.audit._scores import report_of_scores

    with clean_errors():
        if ledger is not None:
            from tfdpfl.accounting.pricing import check_delta
            from tfdpfl.reports import read

            if claim is not None:
                raise BadArgument(f"--ledger {ledger} and --epsilon {claim:g} are two claims. Give one of them.")
            if delta is None:
                raise BadArgument(f"--ledger {ledger} states epsilon at a delta, and --delta is missing. Give it.")
            claim = next(iter(read([ledger]).values())).epsilon(check_delta(delta))
        made = report_of_scores(scores, delta=delta, claim=claim, **how)
    _print(made, as_json, str)
    if made.claim_stands is False:
        raise SystemExit(1)


@main.command()
@click.option("--data-dir", envvar="TFDPFL_DATA_DIR", help="Folder with MNIST. Default: small digits.")
@click.option("--epochs", type=int, help="Passes over the data.")
@click.option("--output", type=NewFile(), default="tfdpfl-demo.png", show_default=True, help="Picture to write.")
@click.option("--seed", type=int, help="Seed for a run that can be repeated. A known seed gives no privacy.")
@JSON
def demo(data_dir: str | None, epochs: int | None, output: str, seed: int | None, as_json: bool) -> None:
    """Train a private and a plain classifier. Needs TensorFlow."""
    from tfdpfl.demo import run

    with clean_errors():
        run(data_dir=data_dir, epochs=epochs, output=output, as_json=as_json, seed=seed)


@main.command()
def doctor() -> None:
    """Check this machine for private training, and state the cost of what is missing."""
    from tfdpfl.doctor import examine

    click.echo("\n".join(map(str, examine())))


@main.command()
@click.option("--port", type=click.IntRange(1, 65535), required=True, help="Port for remote_runtime.")
@click.option(
    "--max-concurrent-clients",
    type=click.IntRange(1),
    help="Clients that run at once. Default: one for each processor.",
)
def worker(port: int, max_concurrent_clients: int | None) -> None:
    """Serve federated computations to remote_runtime. Needs TensorFlow Federated.

    The worker listens on all interfaces, without encryption, and trusts everyone who connects. Keep the port behind a
    firewall.
    """
    try:
        from tfdpfl.federated import runtime

        runtime.worker(port, max_concurrent_clients)
    except (ImportError, RuntimeError) as error:
        raise BadArgument(str(error)) from error


def _unit(said: str) -> tuple[str, str]:
    name, _, unit = said.partition("=")
    if not (name and unit):
        raise BadArgument(
            f"--unit {said} names no unit, so the ledger would be added to nothing. Write FILE=UNIT, the file's name "
            "without its ending and what it protects, for instance --unit training=example."
        )
    return name, unit


def _report(run: Keywords) -> "PrivacyReport":
    from tfdpfl.accounting import privacy_report

    with clean_errors():
        return privacy_report(**run)


def _print(report: Any, as_json: bool, headline: Callable[[Any], str]) -> None:
    if as_json:
        import json

        click.echo(json.dumps(report.to_dict(), indent=2, allow_nan=False))
        return
    text = headline(report)
    click.echo(text)
    if text != str(report):
        click.echo(
            f"(epsilon {_up(report.epsilon)}, delta {report.delta:g}, adjacency {report.adjacency}, "
            f"sampling {report.sampling}, accountant {report.accountant}, "
            f"noise multiplier {report.noise_multiplier:g}, {report.steps} steps, "
            f"batch {report.batch_size} of {report.num_examples}{_of_a_user(report)})"
        )
        for caveat in _caveats(report):
            click.echo(caveat)


def _of_a_user(report: "PrivacyReport") -> str:
    k = report.max_examples_per_user
    return "" if k == 1 else f", for a user of at most {k} examples"


def _caveats(report: "PrivacyReport") -> Iterator[str]:
    from tfdpfl.accounting.report import GENERAL_NOTES
    from tfdpfl.accounting.sampling import SCHEMES

    known = {*GENERAL_NOTES, SCHEMES[str(report.sampling)].note}
    yield from (f"Note: {note}" for note in report.notes if note not in known)
    if report.shuffled_epsilon is not None:
        yield (
            f"Note: fit shuffles its batches, at epsilon {_up(report.shuffled_epsilon)}; "
            "the figure above is for tfdpfl.data.poisson_batches."
        )


def _up(number: float) -> str:
    from tfdpfl.accounting.report import rounded_up

    return rounded_up(number)
