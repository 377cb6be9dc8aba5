"""Posts signed facts to a URL; docs/plugins.md describes receivers.

Invariants:
- Facts are posted in order, each at least once. The queue is the daemon's journal: no fact is lost while the journal
  keeps it.
- Only a fact that the receiver refuses repeatedly is skipped; it is counted and logged.
- Every body is signed, and redirects are not followed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import os
import ssl
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import msgspec

from forged import __version__
from forged.plugins import (
    ConfigError,
    Fact,
    Gap,
    PluginContext,
    Problem,
    Record,
    Role,
    Unavailable,
    to_json,
)

if TYPE_CHECKING:
    import aiohttp

API_VERSION = 1

SECRET_BYTES_MAX = 4096
ANSWER_BYTES_MAX = 1024
"""The bytes read of an error response."""
SHOWN_CHARS_MAX = 200
RETRY_AFTER_MAX_S = 3600.0
MISCONFIGURED_PAUSE_S = 30.0
"""The pause after a configuration error."""
TEST_TIMEOUT_S = 8.0
"""Less than the daemon's limit for commands."""

REFUSED = frozenset({400, 409, 413, 422})
"""Statuses that refuse this body."""
PASSING = frozenset({408, 425, 429})

Seconds = Annotated[float, msgspec.Meta(gt=0, le=300)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    secret_file: str
    types: list[str] = []
    jobs: list[str] = []
    batch_max: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    body_bytes_max: Annotated[int, msgspec.Meta(ge=1 << 12, le=1 << 26)] = 1 << 20
    timeout_s: Seconds = 10.0
    attempts_max: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 5
    ca_file: str = ""
    proxy: str = ""
    plain_http: bool = False


def register(context: PluginContext) -> None:
    """Follow the facts that the settings select."""
    settings = context.settings(Settings)
    access = _access(context.name, settings)
    webhook = Webhook(context, settings, Receiver(settings, access, context.clock.wall))
    context.command("status", webhook.status, help="show position and counters", needs=Role.VIEWER)
    context.command("test", webhook.test, help="post an empty delivery and show the response")
    context.on_stop(webhook.receiver.close)


class Verdict(Enum):
    """What a response means for a delivery."""

    DELIVERED = auto()
    LATER = auto()
    REFUSED = auto()
    MISCONFIGURED = auto()


def judge(status: int) -> Verdict:
    """The verdict of a status; unknown statuses count as configuration errors, which lose nothing."""
    if 200 <= status < 300:
        return Verdict.DELIVERED
    if status in PASSING or 500 <= status < 600:
        return Verdict.LATER
    return Verdict.REFUSED if status in REFUSED else Verdict.MISCONFIGURED


def retry_after_s(header: str | None, now: float) -> float:
    """The pause in seconds that `Retry-After` asks for, as a number or a date; 0 if it is invalid."""
    text = (header or "").strip()
    if text.isascii() and text.isdecimal():
        wanted_s = float(text[:10])
    else:
        try:
            date = parsedate_to_datetime(text)
        except (ValueError, TypeError, OverflowError):
            return 0.0
        wanted_s = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now
    return min(max(wanted_s, 0.0), RETRY_AFTER_MAX_S)


def sign(secret: bytes, at: int, body: bytes) -> str:
    """The signature of a body posted at that time."""
    return f"t={at},v1={hmac.new(secret, b'%d.' % at + body, hashlib.sha256).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Parcel:
    """One delivery: the facts from `first` to `last`, or none."""

    key: str
    body: bytes
    first: int = 0
    last: int = 0
    count: int = 0


def pack(history: str, records: Sequence[Record], bytes_max: int, end: int | None = None) -> Parcel:
    """As many records as fit into one body, at least one, up to the id `end`."""
    head = b'{"history":%b,"facts":[' % msgspec.json.encode(history)
    lines: list[bytes] = []
    room = bytes_max - len(head) - len(b"]}")
    for record in records:
        line = to_json(record)
        room -= len(line) + 1
        if room < 0 and lines:
            break
        lines.append(line if room >= 0 else _without_fact(line))
        if room < 0 or record.id == end:
            break
    first, last = records[0].id, records[len(lines) - 1].id
    return Parcel(f"{history}-{first}-{last}", head + b",".join(lines) + b"]}", first, last, len(lines))


def pack_gap(history: str, gap: Gap) -> Parcel:
    """A delivery that reports a gap."""
    said = {"first": gap.first, "last": gap.last, "reason": gap.reason}
    body = msgspec.json.encode({"history": history, "facts": [], "gap": said})
    return Parcel(f"{history}-{gap.first}-{gap.last}-gap", body, gap.first, gap.last)


def _without_fact(line: bytes) -> bytes:
    """A fact that is too large for a body, without its content."""
    head: dict[str, Any] = msgspec.json.decode(line)
    return msgspec.json.encode(head | {"fact": None, "omitted_bytes": len(line)})


class Answer(NamedTuple):
    """A receiver's response."""

    status: int
    retry_after_s: float
    location: str
    text: str

    def __str__(self) -> str:
        where = f" to {self.location}" if self.location else ""
        return f"it responds with {self.status}{where}{': ' if self.text else ''}{self.text}"


class Access(NamedTuple):
    """The secret and the TLS context."""

    secret: bytes
    tls: ssl.SSLContext | None


class Receiver:
    """The receiver at the URL."""

    def __init__(self, settings: Settings, access: Access, wall: Callable[[], float]) -> None:
        parts = urlsplit(settings.url)
        self.place = f"{parts.scheme}://{parts.netloc}"
        """Scheme and host of the URL; the path may contain a secret."""
        self._settings = settings
        self._access = access
        self._wall = wall
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def post(self, parcel: Parcel, timeout_s: float | None = None) -> Answer:
        """Post a body; returns the response, or raises `Unavailable` without one in time."""
        import aiohttp

        timeout_s = timeout_s or self._settings.timeout_s
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._opened().post(
                    self._settings.url,
                    data=io.BytesIO(parcel.body),
                    headers=self._headers(parcel),
                    allow_redirects=False,
                    proxy=self._settings.proxy or None,
                ) as response,
            ):
                return await self._read(response)
        except TimeoutError as error:
            raise _unreachable(self.place, f"no answer in {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(self.place, _in_words(error)) from error

    async def close(self) -> None:
        """Close the connection."""
        session, self._session, self._closed = self._session, None, True
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._closed:
            raise Unavailable(
                "webhook_stopping", "the daemon is stopping", "the remaining facts are posted after its restart"
            )
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._access.tls or True),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    def _headers(self, parcel: Parcel) -> dict[str, str]:
        return {
            "Content-Type": "application/json",
            "User-Agent": f"forged/{__version__}",
            "Forged-Delivery": parcel.key,
            "Forged-Signature": sign(self._access.secret, int(self._wall()), parcel.body),
        }

    async def _read(self, response: aiohttp.ClientResponse) -> Answer:
        # The body of a success is not read; of an error only its first bytes.
        said = b"" if judge(response.status) is Verdict.DELIVERED else await self._beginning(response)
        headers = response.headers
        return Answer(
            response.status,
            retry_after_s(headers.get("Retry-After"), self._wall()),
            _shown(headers.get("Location", "")),
            _shown(said.decode(errors="replace")),
        )

    async def _beginning(self, response: aiohttp.ClientResponse) -> bytes:
        """The first bytes of an error response. If reading fails, the status still counts.

        One that does not come in time is no answer at all, whatever its status: the attempt is given up.
        """
        import aiohttp

        said = b""
        try:
            while len(said) < ANSWER_BYTES_MAX and (more := await response.content.read(ANSWER_BYTES_MAX - len(said))):
                said += more
        except (aiohttp.ClientError, OSError):
            pass
        return said


class Webhook:
    """Delivers facts and acts on the responses."""

    def __init__(self, context: PluginContext, settings: Settings, receiver: Receiver) -> None:
        self.receiver = receiver
        self._feed = context.follow(
            settings.types or Fact,
            self.deliver,
            jobs=settings.jobs,
            name="facts",
            batch_max=settings.batch_max,
            # Each attempt has its own limit; at worst one call posts each fact alone while searching the refused one.
            deadline_s=2 * settings.batch_max * (settings.timeout_s + 1),
            on_gap=self.tell,
        )
        self._context = context
        self._settings = settings
        self._together_max = settings.batch_max
        self._refusals = 0
        """How often the next delivery was refused; at `attempts_max` the search for the refused fact begins."""
        self._done = 0
        """The id of the last fact that was delivered or skipped."""
        self._end: int | None = None
        """The last id of the failed delivery, so that each attempt posts the same facts."""
        self._not_before = 0.0
        self._last_error: Unavailable | None = None
        self._delivered = self._deliveries = self._left_out = self._gaps = 0
        self._last_status: int | None = None
        self._last_delivery_at: float | None = None

    async def deliver(self, records: Sequence[Record]) -> None:
        """Post facts until all are delivered or skipped, or raise `Unavailable`."""
        rest = [record for record in records if record.id > self._done]
        while rest:
            prepare = partial(pack, self._context.history, rest[: self._together_max], self._settings.body_bytes_max)
            # In a thread, because encoding large facts would block the event loop.
            parcel = await asyncio.to_thread(prepare, self._end)
            if await self._settled(parcel):
                rest = rest[parcel.count :]
        self._stop_searching()

    async def tell(self, gap: Gap) -> None:
        """Post a gap."""
        await self._settled(pack_gap(self._context.history, gap))

    async def test(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Post an empty delivery at once."""
        history, clock = self._context.history, self._context.clock
        body = msgspec.json.encode({"history": history, "facts": [], "ping": True})
        began = clock.monotonic()
        parcel = Parcel(f"{history}-ping-{clock.wall():.6f}", body)
        answer = await self.receiver.post(parcel, min(self._settings.timeout_s, TEST_TIMEOUT_S))
        accepted = judge(answer.status) is Verdict.DELIVERED
        if accepted:
            self._not_before = 0.0
        return {
            "accepted": accepted,
            "status": answer.status,
            "answer": answer.text,
            "location": answer.location,
            "took_s": round(clock.monotonic() - began, 6),
        }

    def status(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The plugin's position and counters."""
        now, feed = self._context.clock.monotonic(), self._feed
        again_at = max(feed.again_at or 0.0, self._not_before)
        return {
            "receiver": self.receiver.place,
            "delivered": self._delivered,
            "deliveries": self._deliveries,
            "left_out": self._left_out,
            "gaps": self._gaps,
            "position": feed.position,
            "behind": feed.behind,
            "last_delivery_at": self._last_delivery_at,
            "last_status": self._last_status,
            "last_error": None if self._last_error is None else str(self._last_error),
            "next_attempt_s": round(again_at - now, 3) if again_at > now else None,
        }

    async def _settled(self, parcel: Parcel) -> bool:
        """Whether a delivery is finished: accepted or skipped."""
        self._wait_if_asked_to()
        self._end = parcel.last
        try:
            answer = await self.receiver.post(parcel)
        except Unavailable as error:
            self._last_status = None
            self._noticed(error)
            raise
        self._last_status = answer.status
        verdict = judge(answer.status)
        if verdict is Verdict.DELIVERED:
            self._taken(parcel)
        elif verdict is Verdict.REFUSED:
            return self._refused(parcel, answer)
        else:
            raise self._not_now(verdict, answer)
        return True

    def _taken(self, parcel: Parcel) -> None:
        self._done, self._end = parcel.last, None
        self._delivered += parcel.count
        self._gaps += not parcel.count
        self._deliveries += 1
        self._last_delivery_at = self._context.clock.wall()
        if not self._searching:
            self._refusals = 0
        if self._last_error is not None:
            self._last_error = None
            self._context.log.info("the receiver accepts facts again", receiver=self.receiver.place)

    def _refused(self, parcel: Parcel, answer: Answer) -> bool:
        """Retry the delivery or half of it; skip a single fact that is refused."""
        self._refusals += 1
        if not self._searching:
            fix = "see the receiver's log"
            raise self._noticed(Unavailable("webhook_refused", f"{self.receiver.place} refuses facts: {answer}", fix))
        self._end = None
        if parcel.count > 1:
            self._together_max = parcel.count // 2
            return False
        self._left_out += 1
        self._done = parcel.last
        self._stop_searching()
        self._context.log.error(
            "a fact that the receiver refuses was skipped", first=parcel.first, last=parcel.last, answer=str(answer)
        )
        return True

    @property
    def _searching(self) -> bool:
        return self._refusals >= self._settings.attempts_max

    def _stop_searching(self) -> None:
        self._refusals, self._together_max = 0, self._settings.batch_max

    def _not_now(self, verdict: Verdict, answer: Answer) -> Unavailable:
        pause_s, fix = answer.retry_after_s, ""
        if verdict is Verdict.MISCONFIGURED:
            pause_s, fix = max(pause_s, MISCONFIGURED_PAUSE_S), "correct `url`, the secret or the receiver"
        self._not_before = self._context.clock.monotonic() + pause_s
        return self._noticed(Unavailable(f"webhook_{verdict.name.lower()}", f"{self.receiver.place}: {answer}", fix))

    def _wait_if_asked_to(self) -> None:
        if self._last_error is not None and self._context.clock.monotonic() < self._not_before:
            raise self._last_error.with_traceback(None)

    def _noticed(self, error: Unavailable) -> Unavailable:
        if self._last_error is None or self._last_error.code != error.code:
            self._context.log.warning("the receiver accepts no facts", reason=str(error))
        self._last_error = error
        return error


def _unreachable(place: str, reason: str) -> Unavailable:
    return Unavailable(
        "webhook_unreachable", f"{place}: {_shown(reason)}", "check that the receiver runs and can be reached"
    )


def _in_words(error: Exception) -> str:
    """The cause of an error below the HTTP client, if known."""
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(inner, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {inner.verify_message}"
    return getattr(inner, "strerror", None) or f"{type(error).__name__}: {inner}"


def _shown(text: str) -> str:
    """The text cut to one short line."""
    return "".join(one if one.isprintable() else " " for one in text.strip()[:SHOWN_CHARS_MAX])


# The settings.


def _access(name: str, settings: Settings) -> Access:
    """Read the files that the settings name, or raise `ConfigError` with all problems."""
    problems = [*_url_problems("url", settings.url, plain=settings.plain_http)]
    if settings.proxy:
        problems += _url_problems("proxy", settings.proxy, plain=True)
    secret, tls = b"", None
    try:
        import aiohttp  # noqa: F401 - imported now, so that the first delivery does not wait for it
    except ImportError:
        problems.append(("url", settings.url, "posted to with aiohttp, which is not installed: pip install aiohttp"))
    try:
        secret = _read_secret(settings.secret_file)
    except (OSError, ValueError) as error:
        problems.append(
            (
                "secret_file",
                settings.secret_file,
                f"a readable file: {_reason(error)}" if isinstance(error, OSError) else str(error),
            )
        )
    try:
        if not settings.url.startswith("http://") or settings.ca_file:
            tls = ssl.create_default_context(cafile=settings.ca_file or None)
    except (OSError, ValueError) as error:
        problems.append(("ca_file", settings.ca_file, f"a file with authorities in PEM: {_reason(error)}"))
    if problems:
        found = [Problem(f"plugins.{name}.{key}", value, wanted) for key, value, wanted in problems]
        raise ConfigError("webhook_settings", "the webhook's settings are invalid", "fix these settings", found)
    return Access(secret, tls)


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _read_secret(path: str) -> bytes:
    # Non-blocking, because the file may be a pipe without a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("a file with the secret")
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(
                f"readable by its owner only, with mode 0600 (now {stat.S_IMODE(found.st_mode):04o}): chmod go= {path}"
            )
        secret = file.read(SECRET_BYTES_MAX + 1).strip()
    if not secret:
        raise ValueError("a file that is not empty: openssl rand -hex 32")
    if len(secret) > SECRET_BYTES_MAX:
        raise ValueError(f"a file with {SECRET_BYTES_MAX} bytes at most")
    return secret


def _url_problems(key: str, url: str, *, plain: bool) -> Iterator[tuple[str, str, str]]:
    try:
        parts = urlsplit(url)
        sound = bool(parts.hostname) and url.isprintable() and " " not in url and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:
        parts, sound = SplitResult("", "", "", "", ""), False
    if not sound or parts.scheme not in ("https", "http"):
        yield key, url, "https://host/path"
        return
    if parts.username is not None or parts.password is not None or parts.fragment:
        yield key, f"{parts.scheme}://...@{parts.hostname}", "a URL without a password, a user or a #fragment"
    if parts.scheme == "http" and not plain and not _is_loopback(parts.hostname or ""):
        yield key, f"http://{parts.hostname}", "https://..., unless plain_http = true allows unencrypted requests"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
