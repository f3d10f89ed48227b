"""`viper demo`: everything once, on real data."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = ["viper demo", "viper demo --folder pictures"]


def demo(
    folder: Annotated[Path, typer.Option("--folder", "-o", help="Where pictures and pages go; made if new.")] = Path(),
) -> None:
    """Fit real data, show where the model is sure and where not, and draw it."""
    from viper.errors import OutputError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--folder must be a directory; got {folder}: {error.strerror}.") from None
    from viper.cli.demonstration import main

    main(str(folder))
