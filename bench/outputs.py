"""Whether what a bench measures can be written and drawn, asked before it measures: figures are minutes of work."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ring.core.errors import ConfigError


def check_outputs(*, out: str, plot: str = "") -> None:
    """out: where records go; plot: a picture's file, "" for none. Makes directories that are not there.

    Raises ConfigError: there is no writing there, or no drawing of such a file."""
    if plot:
        _check_drawing(plot)
        _check_writing(Path(plot).parent, f"--plot {plot}")
    _check_writing(Path(out), f"--out {out}")


def _check_drawing(plot: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; pip install -e '.[report]' in a clone of DisaggKD") from error
    path = Path(plot)
    formats = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in formats:
        allowed = ", ".join(f".{name}" for name in formats)
        raise ConfigError(f"--plot {plot}: no kind of picture; allowed: a file that ends in {allowed}")
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise ConfigError(f"--plot {plot}: can't be written; allowed: a file")


def _check_writing(directory: Path, asked: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Permissions alone do not say it: a file system may be read-only or full.
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"!")
            file.flush()
    except OSError as error:
        raise ConfigError(
            f"{asked}: can't be written: {error.strerror}; allowed: a place with room for files"
        ) from error
