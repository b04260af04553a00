"""One point of a search space, and the traits of a call that change code without being searched."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

Value = int | bool | str


def digest_of(text: str) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of `text`: enough to name a kernel, short enough to read."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A template and the value of each of its parameters, sorted by name so that equal points are equal values."""

    template: str  # "triton/forward": templates/<template>.py.j2 and search_spaces/<template>.yaml
    params: tuple[tuple[str, Value], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", tuple(sorted(self.params)))

    @classmethod
    def of(cls, template: str, params: dict[str, Value]) -> Variant:
        """Builds a variant from a mapping."""
        return cls(template=template, params=tuple(params.items()))

    def __getitem__(self, name: str) -> Value:
        return dict(self.params)[name]

    def as_dict(self) -> dict[str, Value]:
        """The parameters as a new dictionary, sorted by name."""
        return dict(self.params)

    @property
    def digest(self) -> str:
        """Names the template and its parameters."""
        return digest_of(f"{self.template} {self.params}")

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Facts of one call's tensors that change the generated code but are not searched.

    Tuning runs on the defaults; a call with other traits gets the same variant rendered for them.
    """

    alignment: int = 8  # elements that divide every stride except the last axis's, which is 1; 1 means anything goes
    wide: bool = False  # offsets inside one head of one sequence can pass 2**31 elements
    lse: bool = False  # the log-sum-exp of each row is wanted as a second output; of gradients: it has one too
    bias: str = ""  # Triton's name of the bias's element type: u8 for booleans; "" without a bias
    # Elements that divide the number of keys, and every stride of a bias of pairs but the keys', which is 1; 0 means
    # anything goes, as for a bias that keys share. A bias is loaded as wide as this says.
    bias_alignment: int = 0
    bias_shared: bool = False  # all queries share the row of a bias of pairs: its step from query to query is 0
    # Triton's name of the element type of an output of other keys. The kernel merges its own into that, and its LSE
    # likewise; "" where it writes its own alone.
    merged: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A rendered kernel: a Python file that stands alone."""

    name: str  # the @triton.jit function to launch
    text: str
    variant: Variant
    traits: Traits
    digest: str = field(init=False, compare=False)  # names the kernel

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", digest_of(self.text))
