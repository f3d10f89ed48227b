"""`viper summary`: show a saved model."""

from typing import Annotated

import typer

from viper.cli import options
from viper.cli.terminal import print_json


def show_summary(
    model: options.ModelPath,
    level: options.Level = 0.95,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Show every coefficient, not only the 20 most standard deviations away from zero."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show a saved model: coefficients with intervals, quality of the approximation, scores, and its training data.

    Examples
    --------
    viper summary model.viper
    viper summary model.viper --all --level 0.9
    viper summary model.viper --json
    """
    from viper.data.table_file import check_input

    check_input(model)
    import viper
    from viper.cli.model_card import MOST_SHOWN, model_document, print_card, print_model

    document = model_document(viper.load(model), level)
    if as_json:
        print_json(document)
    else:
        most = None if everything else MOST_SHOWN
        print_model(document, most, saved=model)
        print_card(document["card"], most)
