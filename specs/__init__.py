"""The contract: abstract classes, errors and names every backend and the runtime share.

Read in this order: :mod:`.geometry` and :mod:`.write_loc` (what KV memory is and where a write lands), :mod:`.pool` (the doors),
:mod:`.segment` (what is captured), :mod:`.backend` (all of it in front of a driver), :mod:`.driver` (what a port implements);
then :mod:`.array_namespace` (what a model may ask of a device's arrays) and :mod:`.draws` (what its random numbers are). Operations
that a namespace may add and need not: :mod:`.translation` (of virtual ids), :mod:`.step_operations` (of a decode step's rows).
"""

from .array_namespace import ArrayNamespace
from .attention import AttentionParams, DecodeCall
from .backend import Backend
from .capabilities import Capabilities
from .counters import Counters
from .descriptor import Availability, BackendDescriptor, Candidate, ModeDescriptor, Selection
from .driver import Driver
from .errors import (
    BackendUnavailable,
    Cancelled,
    CaptureDeclined,
    CaptureViolation,
    ColdCapture,
    DeviceLost,
    DoubleFree,
    ForebayError,
    InvalidInput,
    InvalidLayout,
    InvalidModel,
    InvalidSetting,
    ModelUnavailable,
    OutOfBlocks,
    QueueFull,
    StaleShadow,
    StaleTrace,
    UnknownBackend,
    UnmarkedWriteLoc,
    Unsupported,
)
from .geometry import KVGeometry
from .pool import Pool
from .segment import Buffer, Segment, Ticket, Trace
from .shadow import Shadow
from .write_loc import Batch, BlockTable, WriteLoc

__all__ = [
    "ArrayNamespace",
    "AttentionParams",
    "Availability",
    "Backend",
    "BackendDescriptor",
    "BackendUnavailable",
    "Batch",
    "BlockTable",
    "Buffer",
    "Cancelled",
    "Candidate",
    "Capabilities",
    "CaptureDeclined",
    "CaptureViolation",
    "ColdCapture",
    "Counters",
    "DecodeCall",
    "DeviceLost",
    "DoubleFree",
    "Driver",
    "ForebayError",
    "InvalidInput",
    "InvalidLayout",
    "InvalidModel",
    "InvalidSetting",
    "KVGeometry",
    "ModeDescriptor",
    "ModelUnavailable",
    "OutOfBlocks",
    "Pool",
    "QueueFull",
    "Segment",
    "Selection",
    "Shadow",
    "StaleShadow",
    "StaleTrace",
    "Ticket",
    "Trace",
    "UnknownBackend",
    "UnmarkedWriteLoc",
    "Unsupported",
    "WriteLoc",
]
