"""The command line `hf-ssd`. Heavy imports live inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import typer

from .arguments import arguments
from .bench import bench
from .chaos import chaos, soak
from .check_sampling import check_sampling
from .compare import compare
from .demo import demo
from .distill import distill
from .doctor import doctor
from .evaluate import evaluate
from .families import families
from .frontier import frontier
from .policies import policies
from .predict import predict

app = typer.Typer(
    name="hf-ssd",
    help="Lossless speculative speculative decoding for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(doctor)
app.command()(compare)
app.command()(bench)
app.command()(frontier)
app.command()(policies)
app.command()(predict)
app.command()(families)
app.command()(arguments)
app.command()(demo)
app.command()(distill)
app.command()(evaluate)
app.command()(check_sampling)
app.command()(chaos)
app.command()(soak)


@app.command()
def version() -> None:
    """Show the versions of hf_ssd, torch and transformers."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    for package in ("hf_ssd", "torch", "transformers"):
        try:
            typer.echo(f"{package} {version_of(package)}")
        except PackageNotFoundError:
            typer.echo(f"{package} is not installed as a package")


def main() -> None:
    """Entry point of `hf-ssd`."""
    app()
