"""State that a rank has before a move, and the state that all ranks have together."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import ClassVar

from par_groups import Claims, GlobalTensor, merge_claims

from .._agreement import Comparable, divided, united_content
from ..format.manifest import Manifest
from ..plan.claims import claims_of, name_of, section_of
from ..state.collect import Content
from ..state.model import check_layout
from ..state.state import State
from ..storage.directory import Directory, StoredTensor
from ..storage.outline import Outline
from ..transfer.exchange import claims_of_all, words_of
from ..transfer.ranks import Ranks, words

Planned = Callable[[Hashable, Callable[[], Sequence[GlobalTensor]]], Sequence[GlobalTensor]]


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """State of one rank, in the form in which ranks compare it.

    Args:
        content: State of the rank.
        claims: Boxes that the rank has of each tensor.
        same: Parts that are usually the same on every rank.
    """

    content: Content
    claims: Claims
    same: Comparable

    SIZES: ClassVar[dict[str, int]] = dict.fromkeys(
        ("claims", *(field.name for field in fields(Comparable))), len(words(b""))
    )
    COUNT: ClassVar[int] = sum(SIZES.values())

    @classmethod
    def of(cls, content: Content, source: State) -> "Holdings":
        """Return the holdings of a rank.

        Args:
            content: Content of the source.
            source: Objects of the rank whose state moves.
        """
        same = Comparable.of(content, source.layout, source.model)
        if source.is_empty:
            same = Comparable(layout=same.layout, samples=[], state=None, tied=[])
        return cls(content=content, claims=claims_of(content.entries), same=same)

    def words(self, rank: int) -> list[int]:
        """Return `COUNT` integers, whose sums over all ranks show in what the ranks differ."""
        digests = {"claims": words_of(self.claims, rank), **self.same.digests()}
        return [*chain.from_iterable(digests[name] for name in self.SIZES)]

    def united(
        self, sums: Iterable[int], ranks: Ranks, planned: Planned, sections: Sequence[str]
    ) -> tuple[Sequence[GlobalTensor], Outline]:
        """Return the tensors of all ranks, and all other state in the form in which a load reads it. Collective.

        Args:
            sums: Sums of `words` over all ranks.
            ranks: The ranks.
            planned: Function that returns the plan with a key, or makes it; see `Session.planned`.
            sections: Sections that any rank's target has: "model", "optimizer".

        Raises:
            ValueError: Ranks disagree about a tensor or about state that is the same on all ranks; on every rank.
        """
        by_name = divided(sums, self.SIZES)
        differs = self.same.differences(by_name, ranks.size)
        layouts = ranks.distinct(self.same.layout) if "layout" in differs else [((0,), self.same.layout)]
        check_layout([names for _, names in layouts])
        # A run moves its state again and again, so the tensors of the last move are kept by the digest of all claims.
        tensors = planned(("move", *by_name["claims"]), lambda: merge_claims(claims_of_all(ranks, self.claims)))
        content = united_content(self.content, self.same, differs, ranks, tensors)
        return tensors, _outline_of(content, tensors, sections)


def _outline_of(content: Content, tensors: Iterable[GlobalTensor], sections: Iterable[str]) -> Outline:
    """Return the content of all ranks in the form in which a load reads that of a folder.

    Args:
        content: Content of this rank, with the state of all ranks.
        tensors: Tensors of all ranks.
        sections: The sections that are filled.
    """
    places: dict[str, dict[str, StoredTensor]] = {section: {} for section in sections}
    for tensor in tensors:
        if (section := section_of(tensor.key)) in places:
            places[section][name_of(tensor.key)] = StoredTensor("", tensor.dtype, tensor.shape, 0, 0)
    state = content.state
    manifest = Manifest(
        style="huggingface",
        files={},
        tied=content.tied,
        model=state.parts["model"],
        optimizer=state.optimizer if "optimizer" in places else None,
        scheduler=state.parts["scheduler"],
        extra=state.parts["extra"],
    )
    directories = {section: Directory(some) for section, some in places.items()}
    return Outline(manifest=manifest, directories=directories, side=state.tensors)
