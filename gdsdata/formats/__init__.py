"""File formats: each finds the samples of its files and says where they lie (`index.Index`)."""

from gdsdata.formats.npy import Npy
from gdsdata.formats.records import Records
from gdsdata.formats.registry import recognise, register
from gdsdata.formats.tokens import Tokens

__all__ = ["Npy", "Records", "Tokens", "recognise", "register"]
