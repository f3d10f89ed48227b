"""`viper summary`: what a saved model says."""

from typing import Annotated

import typer

from viper.cli import options

EXAMPLES = [
    "viper summary model.viper",
    "viper summary model.viper --all --level 0.9",
    "viper summary model.viper --json",
]


def summary(
    model: options.Model,
    level: options.Level = 0.95,
    everything: Annotated[bool, typer.Option("--all", help="Every coefficient, however close to zero.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show a saved model: coefficients with intervals, trust and scores."""
    from viper.data.table_file import check_input

    check_input(model)
    import viper
    from viper.cli.card import describe, draw
    from viper.cli.terminal import emit

    document = describe(viper.load(model), level)
    if as_json:
        emit(document)
    else:
        draw(document, None if everything else 20, saved=model)
