"""A sequence beside others, in each layout that a call may have."""

from __future__ import annotations

from dataclasses import dataclass

from harness import Config, Draw, Rows, Sequence, cache, in_pages, paged, varlen
from hypothesis import strategies as st


@dataclass(frozen=True)
class Beside:
    """One packed with others, and in a cache beside another."""

    config: Config
    draw: Draw
    packed: list[Sequence]
    place: int  # of that one
    cached: list[Sequence]  # that one comes first

    @property
    def own(self) -> Sequence:
        return self.packed[self.place]

    def assert_same(self, expected: Rows, spare: int, page: int, slack: int = 0) -> None:
        """In every layout: a cache has so many spare keys, and packed sequences are so much shorter than the call says."""
        capacity = max(len(s.k) for s in self.cached) + spare
        packed = (self.config, self.packed, self.place)
        varlen(*packed, slack=slack).assert_same(expected, f"packed, slack {slack}")
        cache(self.config, self.cached, capacity).assert_same(expected, f"in a cache of {capacity}")
        found = paged(self.config, self.cached, self.draw.generator, page=page)
        found.assert_same(expected, f"in pages of {page}")
        pages = in_pages(self.packed, self.draw.generator, page)
        varlen(*packed, pages=pages).assert_same(expected, f"packed, in pages of {page}")


def beside(
    config: Config,
    seed: int,
    lengths: tuple[int, int],
    others: list[tuple[int, int]],
    lengths_k: st.SearchStrategy[int],
    data: st.DataObject,
) -> Beside:
    """A sequence of `lengths` (queries, keys) at any place among others, and in a cache beside one of as many queries."""
    draw = Draw(seed)
    own = draw.sequence(config, *lengths)
    packed = [draw.sequence(config, *each) for each in others]
    place = data.draw(st.integers(0, len(packed)))
    packed.insert(place, own)
    return Beside(config, draw, packed, place, [own, draw.sequence(config, lengths[0], data.draw(lengths_k))])
