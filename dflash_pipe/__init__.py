"""A CSP-style staged pipeline: stages, workers, bounded channels, and a YAML graph that chooses the topology."""

from dflash_pipe.errors import BadInput, BrokenChannel, Cancelled, EndOfChannel, Stalled
from dflash_pipe.form import exactly, refuse_other_form
from dflash_pipe.message import Message, Stamp
from dflash_pipe.stage import Context, Footprint, Source, Stage
from dflash_pipe.transport import Transport

__all__ = [
    "BadInput",
    "BrokenChannel",
    "Cancelled",
    "Context",
    "EndOfChannel",
    "Footprint",
    "Message",
    "Source",
    "Stage",
    "Stalled",
    "Stamp",
    "Transport",
    "exactly",
    "refuse_other_form",
]
