"""What an audit says in plain words: the verdict, what it rests on, what to do, what was not tried.

Every sentence is made of numbers of the audit: nothing here knows more than the table does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from preimage.layers import Layer
from preimage.leak.exposures import FAMILIES, Exposure
from preimage.leak.result import FilesAudit, LeakAudit, LeakCell

READ, SAFE = 0.5, 0.1  # shares of tokens from which an exposure counts as read, and up to which as not read
_STORED = ("float32", "bf16", "fp16", "fp8", "int8", "int4")
_LISTED = 200  # files or prompts that are named one by one
_SECRETS = {
    "permuted": "A secret order of coordinates that stays the same",
    "rotated": "A secret rotation that stays the same",
    "shuffled": "The order of positions",
}


class Verdict(NamedTuple):
    """``tone``: bad (prompts can be read), warn (some of them, or parts), good (next to nothing)."""

    tone: str
    headline: str
    findings: tuple[str, ...]
    advice: tuple[str, ...]
    not_tried: tuple[str, ...]


def judge(audit: LeakAudit) -> Verdict:
    """The verdict on an audit of prompts."""
    tone, headline = _headline(audit)
    return Verdict(tone, headline, tuple(_findings(audit)), tuple(_advice(audit)), tuple(_not_tried(audit)))


def break_even(curve: Iterable[LeakCell]) -> LeakCell | None:
    """The weakest setting of a defence at which less than half of the tokens are read; None: it has none.

    Only settings at which every prompt was read to the end count: what was cut short is no evidence of
    safety.
    """
    return next(
        (cell for cell in curve if cell.tokens < READ and not cell.untried and not cell.hurried), None
    )


def _headline(audit: LeakAudit) -> tuple[str, str]:
    whole = [cell for cell in audit.cells if cell.every]
    most = max((cell for cell in audit.cells if cell.tried), key=lambda cell: cell.tokens, default=None)
    if most is None:
        return "warn", "Nothing was read, because nothing was tried."
    if whole:
        places = len({cell.exposure for cell in whole})
        verified = all(cell.verified == 1 for cell in whole)
        how = "exactly, and verified" if verified else "token for token"
        return "bad", (
            f"Every one of the {audit.prompts} prompts can be read {how} by anyone who has the model: "
            f"{len(whole)} of the {len(audit.cells)} combinations of layer and copy that were tried give all "
            f"of them away, over {places} of {len(audit.exposures)} kinds of copy."
        )
    if most.tokens >= READ:
        return "bad", (
            f"Most of it can be read by anyone who has the model: {most.tokens:.1%} of all tokens "
            f"and {most.exact:.0%} of the prompts whole, from {most.about} at layer {most.layer}{_of(most)}."
        )
    if most.tokens > SAFE:
        return "warn", (
            f"Parts of the prompts can be read: at most {most.tokens:.1%} of all tokens ({most.about}, layer "
            f"{most.layer})."
        )
    return "good", (
        f"Next to nothing was read with the attacks tried: at most {most.tokens:.1%} of all tokens. Guessing "
        f"without any state gives {audit.baseline:.1%} where the words before are known."
    )


def _of(cell: LeakCell) -> str:
    """Which prompts a share is of, where it is not of all read to the end."""
    if any(one.hurried for one in cell.sample):
        return ", read in haste"
    return f", of the {len(cell.sample)} prompts that were read to the end" if cell.hurried else ""


def _findings(audit: LeakAudit) -> Iterable[str]:
    for exposure in audit.exposures:
        cells = [cell for cell in audit.cells if cell.exposure == exposure and cell.tried]
        if not cells:
            continue
        worst, best = (pick(cells, key=lambda cell: cell.tokens) for pick in (max, min))
        about = cells[0].about
        about = about[0].upper() + about[1:]
        if best.exact == 1:
            few = any(cell.hurried for cell in cells)
            yield f"{about}: every prompt that was {'read to the end' if few else 'tried'}, at every layer."
        elif worst.tokens == best.tokens:
            yield f"{about}: {worst.tokens:.1%} of tokens at every layer."
        else:
            yield (
                f"{about}: between {best.tokens:.1%} of tokens (layer {best.layer}) and {worst.tokens:.1%} "
                f"(layer {worst.layer}); prompts read whole: {best.exact:.0%} to {worst.exact:.0%}."
            )
    for family, layer, curve in curves(audit):
        yield _curve_in_words(family, layer, curve)


def curves(audit: LeakAudit) -> Iterable[tuple[str, Layer, tuple[LeakCell, ...]]]:
    """Every family of which several values were tried, at every layer."""
    for family in FAMILIES:
        for layer in audit.layers:
            curve = audit.curve(family, layer) if FAMILIES[family].value else ()
            if len(curve) > 1:
                yield family, layer, curve


def _curve_in_words(family: str, layer: Layer, curve: tuple[LeakCell, ...]) -> str:
    ordered = curve if family not in ("cut",) else curve[::-1]  # from weak to strong
    at = break_even(ordered)
    if at is None:
        last = ordered[-1]
        cost = f", where {last.utility.top1_changed:.0%} of next tokens change" if last.utility else ""
        some = f", of the {last.tried} prompts tried" if last.untried else _of(last)
        claim = "no setting tried keeps half of the tokens unread"
        if last.tokens < READ:
            claim = "too few prompts were read to the end to say from where half of the tokens are unread"
        return (
            f"Layer {layer}, {family}: {claim}; the strongest ({last.about}){cost} leaves {last.tokens:.1%} "
            f"readable{some}."
        )
    cost = ""
    if at.utility is not None:
        cost = (
            f" There {at.utility.top1_changed:.0%} of the model's next tokens are others, and its perplexity "
            f"is {at.utility.perplexity:.3g} instead of {at.utility.perplexity_before:.3g}."
        )
    return (
        f"Layer {layer}, {family}: less than half of the tokens are read from {at.about} on "
        f"({at.tokens:.1%}).{cost}"
    )


def _advice(audit: LeakAudit) -> Iterable[str]:
    by_family: dict[str, list[LeakCell]] = {}
    for cell in audit.cells:
        if cell.tried:
            by_family.setdefault(Exposure.parse(cell.exposure).family, []).append(cell)
    read = {name for name, cells in by_family.items() if max(cell.tokens for cell in cells) >= READ}
    if read:
        yield (
            "Treat stored states, caches and activations as the prompts themselves: the same access rules, "
            "the same retention, encrypted at rest and in transit. Encryption gives away nothing and costs "
            "the model nothing; none of the changes above comes near that."
        )
    if read & set(_STORED[1:]):
        yield "Fewer bits are no protection: they are read like full precision."
    if read & {"keys", "values", "kv"}:
        yield "A cache is as telling as the states: do not share its pages between users, and delete them."
    for name, secret in _SECRETS.items():
        if name in read:
            yield f"{secret} is found out from the states themselves."
    noisy = [
        at for name in ("noise", "lowrank", "clipped") for layer in audit.layers
        if (at := break_even(audit.curve(name, layer)))
    ]  # fmt: skip
    if noisy and all(at.utility and at.utility.top1_changed > 0.5 for at in noisy):
        yield "Noise that hides the prompt also destroys what the states are for."
    elif read & {"noise", "lowrank", "clipped"}:
        yield "Noise at the strengths tried does not hide the prompt; what D/2 secures is the only guarantee."
    for name, cells in by_family.items():
        best = max(cells, key=lambda cell: cell.tokens)
        if name in ("last", "mean") and best.tokens <= SAFE:
            yield (
                f"Keep as little as the use allows: from {best.about} {best.tokens:.1%} of tokens were read "
                "by search. That is what attacks known today reach, not a proof."
            )
    if audit.cells and not read:
        yield "Nothing tried reads half of the tokens; that is no proof against attacks that were not tried."


def _not_tried(audit: LeakAudit) -> Iterable[str]:
    for cell in audit.cells:
        if cell.untried:
            yield (
                f"{cell.exposure} at layer {cell.layer}: {cell.untried} of {audit.prompts} prompts "
                f"({cell.why})."
            )
        if cell.hurried:
            yield (
                f"{cell.exposure} at layer {cell.layer}: {cell.hurried} of {audit.prompts} prompts were not "
                f"read to the end in the {cell.seconds:.0f} s the cell took; in haste {cell.in_haste:.1%} of "
                "their tokens were read."
            )
    given = {Exposure.parse(exposure).family for exposure in audit.exposures}
    left = [name for name in FAMILIES if name not in given]
    if left:
        yield f"Exposures that were not asked for: {', '.join(left)}."
    yield (
        "Attackers without the model's weights, and decoders trained on pairs of states and prompts; several "
        "noisy copies of one prompt; longer prompts than these."
    )


def judge_files(audit: FilesAudit) -> Verdict:
    """The verdict on files that somebody has."""
    clear = [one for one in audit.prompts if one.status == "clear"]
    read = [one for one in audit.prompts if one.status == "recovered"]
    likely = [one for one in audit.prompts if one.status in ("likely", "ambiguous")]
    missed = [one for one in audit.prompts if one.status == "not_recovered"]
    if clear and not (read or likely or missed):
        headline = (
            f"{len(clear)} prompts stand in these files in the clear: whoever has them needs no model and no "
            "attack."
        )
    elif not missed and not audit.unread and (read or likely):
        who = "anyone who has the model" if audit.model else "anyone"
        sure = "exactly" if not likely else "token for token"
        headline = f"Every prompt in these files can be read {sure} by {who}."
    elif read or likely or clear:
        left = len(missed) + len(audit.unread)
        headline = (
            f"{len(clear) + len(read) + len(likely)} prompts can be read from these files; "
            f"of {left} more {'files or prompts' if left != 1 else 'file or prompt'} nothing was."
        )
    elif audit.kinds:
        headline = "No prompt was read from these files with what was tried."
    else:
        headline = "Nothing in these files is of a kind that holds states or prompts."
    tone = "bad" if clear or read or likely else "warn" if audit.kinds else "good"
    return Verdict(
        tone, headline, tuple(_files_findings(audit)), tuple(_files_advice(audit)), tuple(_files_left(audit))
    )


def _files_findings(audit: FilesAudit) -> Iterable[str]:
    for kind in audit.kinds:
        files = "1 file" if kind.files == 1 else f"{kind.files} files"
        clear = f" {kind.clear} hold token ids or text in the clear." if kind.clear else ""
        yield f"{kind.kind}, {files}: {kind.about}{clear}"
    for one in audit.prompts[:_LISTED]:
        yield f"{one.name}: {one.how}; {one.status}. {one.proof}"


def _files_advice(audit: FilesAudit) -> Iterable[str]:
    how = {one.how.partition(":")[0] for one in audit.prompts if one.exact}
    if "in the clear" in how:
        yield "Do not keep token ids or text beside states: leave them out, or encrypt them like the prompts."
    if any(one.how.startswith(("pages", "the names")) for one in audit.prompts if one.exact):
        yield (
            "Names of pages made of token ids confirm every guess: salt them with a secret of each tenant, "
            "keep pages of 16 tokens or more, and remember that only the first page of a prompt is salted."
        )
    if audit.prompts:
        yield (
            "Treat these files as the prompts themselves: the same access rules and retention, encrypted at "
            "rest and in transit."
        )


def _files_left(audit: FilesAudit) -> Iterable[str]:
    if audit.model is None:
        yield "No model was named: states were not inverted, only what needs none was read."
    for name, why in audit.unread[:_LISTED]:
        yield f"{name}: {why}"
    if len(audit.unread) > _LISTED:
        yield f"{len(audit.unread) - _LISTED} more were not read."
    if audit.others:
        yield f"{audit.others} files are of no kind that is known."
    if audit.total > len(audit.prompts):
        yield f"{audit.total - len(audit.prompts)} more prompts were found and are not listed."
