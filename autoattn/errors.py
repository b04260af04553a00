"""Every error that autoattn raises on purpose.

AutoattnError
├── UsageError      what the caller gave breaks a contract; the command line exits with 2
│   ├── ProblemError    an attention problem that cannot exist or is not supported
│   ├── DeviceError     a device that nobody described
│   ├── ShapesError     a shapes file that cannot be read as problems
│   ├── SpaceError      a search space file that cannot be read
│   └── TensorError     tensors that do not make one attention call
│       ├── SdpaError       F.scaled_dot_product_attention refuses the call too, with a RuntimeError
│       ├── SdpaTypeError   the same with a TypeError
│       └── SdpaIndexError  the same with an IndexError
└── StateError      the world is not as needed; the command line exits with 1
    ├── CacheError      a cache file that is damaged, newer, foreign or cannot be written
    ├── StorageError    a server of trials that cannot be reached, read or written
    ├── HostError       what the machine lacks: a folder to write, room on a disk, a program
    ├── GroupError      ranks of a process group that end, or do not answer in time
    ├── CompileError    a kernel that the compiler refuses
    ├── InterpretationError   a kernel that Gluon's interpreter cannot run
    └── SynchronizationError  a kernel that deadlocks, misses a barrier or touches memory that is not its own

Each message is one sentence that names the contract, what came, and the way out.
"""


class AutoattnError(Exception):
    """The root; catch this to catch everything that autoattn raises on purpose."""

    exit_code = 1


class UsageError(AutoattnError, ValueError):
    """What the caller gave breaks a contract."""

    exit_code = 2


class ProblemError(UsageError):
    """An attention problem that cannot exist or is not supported."""


class DeviceError(UsageError):
    """A device that nobody described."""


class ShapesError(UsageError):
    """A shapes file that cannot be read as problems."""


class SpaceError(UsageError):
    """A search space file that cannot be read."""


class TensorError(UsageError):
    """Tensors that do not make one attention call."""


class SdpaError(TensorError, RuntimeError):
    """A call that F.scaled_dot_product_attention refuses too, with a RuntimeError, which this is as well."""


class SdpaTypeError(TensorError, TypeError):
    """A call that F.scaled_dot_product_attention refuses too, with a TypeError, which this is as well."""


class SdpaIndexError(TensorError, IndexError):
    """A call that F.scaled_dot_product_attention refuses too, with an IndexError, which this is as well."""


class StateError(AutoattnError, RuntimeError):
    """The world is not as needed."""


class CacheError(StateError):
    """A cache file that is damaged, newer, foreign or cannot be written."""


class StorageError(StateError):
    """A server of trials that cannot be reached, read or written."""


class HostError(StateError):
    """What the machine lacks: a folder that can be written, room on a disk, a program, a worker that starts."""


class GroupError(StateError):
    """Ranks of a process group that end, or do not answer in time."""


class CompileError(StateError):
    """A kernel that the compiler refuses."""


class InterpretationError(StateError):
    """A kernel that Gluon's interpreter cannot run, which says nothing of the kernel."""


class SynchronizationError(StateError):
    """A kernel that deadlocks, misses a barrier or touches memory that is not its own."""
