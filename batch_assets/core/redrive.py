"""Which dead letters a redrive asks again. Pure; the round is opened by `flows/redrive.py`."""

from collections.abc import Collection

from batch_assets.core.errors import Problem, RefusedError
from batch_assets.core.records import PERMANENT_CLASSES, SET_ASIDE_CLASSES, DeadClass

# What may well go right the next time: the failure was of an answer, an engine or a machine, not of the record.
TRANSIENT_CLASSES = frozenset(DeadClass) - frozenset(PERMANENT_CLASSES)
# Never those that were set aside: nothing was sent to a model, and under the same version they would be set aside again.
REDRIVABLE_CLASSES = frozenset(DeadClass) - frozenset(SET_ASIDE_CLASSES)


def chosen_classes(named: Collection[str]) -> frozenset[DeadClass]:
    """The classes a person named, or all transient ones when none. Raises RefusedError for those that no redrive can help."""
    if not named:
        return TRANSIENT_CLASSES
    refused = sorted(name for name in named if name not in REDRIVABLE_CLASSES)
    if refused:
        raise RefusedError(_not_redrivable(refused))
    return frozenset(DeadClass(name) for name in named)


def _not_redrivable(names: Collection[str]) -> Problem:
    aside = [name for name in names if name in SET_ASIDE_CLASSES]
    what = f"{', '.join(aside)}: set aside at planning, nothing was sent to the model" if aside else f"no such class: {', '.join(names)}"
    fix = "mend the input, or change `input` or `limits` in the job file, and run the job: a new version" if aside else "correct the name"
    return Problem(
        code="redrive.class",
        key="--class",
        what=what,
        expected=f"one of {', '.join(sorted(REDRIVABLE_CLASSES))}",
        found=", ".join(names),
        fix=fix,
    )
