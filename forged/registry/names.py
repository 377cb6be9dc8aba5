"""The names of models: which texts are one, which job owns them, and how they are found again.

Invariants:
- Two names that look the same, or differ in case only, have one form (`form_of`).
- A name has nothing invisible, nothing that changes the direction of text, and one normal form (NFC).
"""

from __future__ import annotations

import re
from hashlib import sha256
from unicodedata import category, normalize

from forged.auth.access import authorise
from forged.auth.model import Principal, Role
from forged.registry.errors import argument_invalid
from forged.registry.messages import LATEST
from forged.registry.versions import parse_version

MODEL_ID_CHARS_MAX = 200
ALIAS = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_PUNCTUATION = frozenset("._- /")
_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0"
    + "".join(map(chr, range(0xFE00, 0xFE10)))
    + "".join(map(chr, range(0xE0100, 0xE01F0)))
)
"""Letters and marks that show nothing."""
_WANTED = (
    f"1 to {MODEL_ID_CHARS_MAX} letters and digits with `.`, `_`, `-`, spaces and `/` between them, in normal form"
    " (NFC), without empty, `.` or `..` parts"
)


def namespace_of(model_id: str) -> str:
    """The first part of a model's id: the job whose principals own the model, if there is such a job."""
    return model_id.partition("/")[0]


def require_access(principal: Principal, needed: Role, model_id: str) -> None:
    """Refuse a principal with a list of jobs the models outside its jobs, whether they exist or not."""
    authorise(principal, needed, namespace_of(model_id))


def form_of(model_id: str) -> str:
    """What two ids that count as one name have in common."""
    return normalize("NFKC", normalize("NFKC", model_id).casefold())


def digest_of(model_id: str) -> str:
    """The model's part of the keys in the store, whose length is limited."""
    return sha256(model_id.encode()).hexdigest()[:32]


def checked_model_id(model_id: str) -> str:
    """The id; refuses texts that are not a model's name."""
    parts = model_id.split("/")
    is_name = (
        0 < len(model_id) <= MODEL_ID_CHARS_MAX
        and all(map(_is_allowed, model_id))
        and not any(part.strip() in ("", ".", "..") for part in parts)
        and model_id == model_id.strip()
        and normalize("NFC", model_id) == model_id
    )
    if not is_name:
        raise argument_invalid("model_id", model_id, _WANTED)
    return model_id


def _is_allowed(character: str) -> bool:
    if character in _PUNCTUATION:
        return True
    return category(character)[0] in "LMN" and character not in _INVISIBLE


def checked_alias(alias: str) -> str:
    """The alias; refuses texts that are none, such as `latest` and versions."""
    if not ALIAS.fullmatch(alias) or alias == LATEST or parse_version(alias) is not None:
        wanted = "1 to 64 of a to z, 0 to 9, `_` and `-`, a letter first, and not `latest`"
        raise argument_invalid("alias", alias, wanted)
    return alias
