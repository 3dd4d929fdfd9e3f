"""The one exception of `gr.data`."""

from __future__ import annotations


class DataError(ValueError):
    """Bad input data. The message names the file, the row or argument, what was seen and wanted."""
