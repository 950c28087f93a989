"""Random damage to bytes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st


@dataclass(frozen=True)
class Damage:
    """One way in which a file goes bad; `place` counts from 0 to 1,000,000 over the file.

    Attributes:
        kind: `flip` a bit, `cut` the end off, `insert` bytes, or `zero` a run of bytes.
        place: where.
        size: bytes to insert or to zero; of a flip, the bit.
    """

    kind: str
    place: int
    size: int

    def __call__(self, content: bytes) -> bytes:
        at = self.place * len(content) // 1_000_001
        if self.kind == "flip":
            flipped = content[at] ^ (1 << self.size % 8)
            return content[:at] + bytes([flipped]) + content[at + 1 :]
        if self.kind == "cut":
            return content[:at]
        if self.kind == "insert":
            return content[:at] + bytes(7 * i % 256 for i in range(self.size)) + content[at:]
        zeros = bytes(min(self.size, len(content) - at))
        return content[:at] + zeros + content[at + len(zeros) :]


damages = st.builds(
    Damage,
    st.sampled_from(["flip", "flip", "flip", "cut", "insert", "zero"]),
    # The ends of a file, where formats keep their tables, as often as the rest.
    st.one_of(st.integers(0, 1_000_000), st.integers(0, 20_000), st.integers(970_000, 1_000_000)),
    st.integers(1, 64),
)
