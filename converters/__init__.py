"""The bridge to Hugging Face checkpoints, in both directions, from files and without torch."""

from converters.bridge import LoadedCheckpoint, export, new_source, open_folder, open_state_dict
from converters.io import parse_size

__all__ = ["LoadedCheckpoint", "export", "new_source", "open_folder", "open_state_dict", "parse_size"]
