"""Fetches media over HTTP, safely: only from allowed hosts and addresses, within limits of bytes, time and redirects.

A host is resolved once, its addresses are checked, and the connection goes to one of them: a name that resolves to
something else a moment later changes nothing. Each redirect is checked like the first URL. Proxies, cookies and
credentials of this machine are not used. Error messages go to clients, so they tell nothing of the internal network.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from batchline.config import MediaConfig
from batchline.errors import BadRequest, ServiceUnavailable, UnprocessableEntity
from batchline.media.addresses import NO_PUBLIC_ADDRESS, FetchRules
from batchline.media.folder import FolderUnwritable, MediaFolder
from batchline.media.sharing import SharedWork

logger = logging.getLogger(__name__)

NUM_ATTEMPTS = 3
FIRST_DELAY_S = 0.5
"""Before the second attempt; doubled before each further one."""

FAILURE_LIFETIME_S = 60.0
"""How long a URL that cannot be fetched is not tried again: a batch may name it in every line."""

NUM_RESOLVING_THREADS = 16

_MAX_FAILURES = 1024
_PIECE_BYTES = 1 << 20
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_HEADERS = {"User-Agent": "batchline", "Accept": "*/*", "Accept-Encoding": "identity"}


class _Transient(Exception):
    """An attempt failed, and the next one may not. reason: completes a sentence that begins with "it"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _NotPublic(Exception):
    """A host without an address that may be connected to."""


class Fetcher:
    """Fetches files into a folder. Each URL is fetched once at a time, whoever asks for it. For one event loop."""

    def __init__(self, config: MediaConfig, rules: FetchRules, resolver: AbstractResolver | None = None) -> None:
        """resolver: finds addresses of hosts; None asks the system."""
        self._config = config
        self._rules = rules
        self._resolver = _CheckedResolver(rules, resolver)
        self._folder = MediaFolder(config.cache_folder, config.cache_bytes)
        self._work: SharedWork[None] = SharedWork()
        self._places = asyncio.Semaphore(config.max_fetches)
        self._host_places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._failures: OrderedDict[str, tuple[str, float]] = OrderedDict()  # reasons, and when
        self._session: aiohttp.ClientSession | None = None
        self._start_lock = asyncio.Lock()

    @asynccontextmanager
    async def fetched(self, url: str) -> AsyncIterator[Path]:
        """The file of a URL, which stays until the block ends. Raises: BadRequest, UnprocessableEntity."""
        checked = self._rules.checked_url(url)
        if self._session is None:
            await self._start()
        with self._folder.pinned(url):
            while (path := self._folder.find(url)) is None:
                self._raise_failure(url)
                await self._work.result(url, partial(self._fetch, url, checked))
            yield path

    async def close(self) -> None:
        """End connections, and delete files that are kept for no run. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self._resolver.close()
        await asyncio.to_thread(self._folder.close)

    async def _start(self) -> None:
        async with self._start_lock:
            if self._session is not None:
                return
            try:
                await asyncio.to_thread(self._folder.open)
            except FolderUnwritable as exc:
                raise _not_stored(exc) from exc
            connector = aiohttp.TCPConnector(
                resolver=self._resolver,
                use_dns_cache=False,
                limit=self._config.max_fetches,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS,
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
            )

    def _raise_failure(self, url: str) -> None:
        """Raises: UnprocessableEntity if the URL has failed lately."""
        reason, when = self._failures.get(url, ("", 0.0))
        if reason and asyncio.get_running_loop().time() - when < FAILURE_LIFETIME_S:
            raise UnprocessableEntity(reason)

    async def _fetch(self, url: str, checked: URL) -> None:
        try:
            await self._with_retries(url, checked)
        except UnprocessableEntity as exc:
            self._failures[url] = (exc.message, asyncio.get_running_loop().time())
            self._failures.move_to_end(url)
            if len(self._failures) > _MAX_FAILURES:
                self._failures.popitem(last=False)
            raise

    async def _with_retries(self, url: str, checked: URL) -> None:
        # a slow host must not occupy all places
        host_places = self._host_places.setdefault(
            checked.raw_host or "", asyncio.Semaphore(max(1, self._config.max_fetches // 4))
        )
        delay_s = FIRST_DELAY_S
        for attempt in range(1, NUM_ATTEMPTS + 1):
            try:
                async with host_places, self._places:
                    return await self._attempt(url, checked)
            except _Transient as exc:
                if attempt == NUM_ATTEMPTS:
                    raise UnprocessableEntity(exc.reason) from exc
            await asyncio.sleep(delay_s)
            delay_s *= 2
        return None

    async def _attempt(self, url: str, checked: URL) -> None:
        """Raises: _Transient, UnprocessableEntity; here the exceptions of the HTTP client become ours."""
        try:
            await asyncio.wait_for(self._download(url, checked), self._config.fetch_timeout_s)
        except FolderUnwritable as exc:
            raise _not_stored(exc) from exc
        except _NotPublic as exc:
            logger.info("refused to fetch media from %s: %s", checked.host, exc)
            raise UnprocessableEntity(NO_PUBLIC_ADDRESS) from exc
        except asyncio.TimeoutError as exc:
            raise _Transient(f"fetching it took more than {self._config.fetch_timeout_s:g} seconds") from exc
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientConnectorSSLError) as exc:
            raise UnprocessableEntity("its server has no valid certificate") from exc
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as exc:
            raise _Transient("the connection to its server failed") from exc
        except (aiohttp.ClientError, ValueError) as exc:
            raise UnprocessableEntity("its server gave no valid HTTP answer") from exc

    async def _download(self, url: str, checked: URL) -> None:
        assert self._session is not None
        target = checked
        for _ in range(self._config.max_redirects + 1):
            async with self._session.get(target, allow_redirects=False) as response:
                if response.status not in _REDIRECTS:
                    return await self._save(url, response)
                target = self._redirected(target, response)
        raise UnprocessableEntity(f"it is redirected more than {self._config.max_redirects} times")

    def _redirected(self, source: URL, response: aiohttp.ClientResponse) -> URL:
        """Raises: UnprocessableEntity if the target may not be fetched."""
        try:
            return self._rules.checked_url(str(source.join(URL(response.headers.get("Location", "")))))
        except ValueError as exc:
            raise UnprocessableEntity("it is redirected to something that is not a URL") from exc
        except BadRequest as exc:
            raise UnprocessableEntity(f"after a redirect, {exc.message}") from exc

    async def _save(self, url: str, response: aiohttp.ClientResponse) -> None:
        if response.status in _TRANSIENT_STATUSES:
            raise _Transient(f"its server answered with status {response.status}")
        if response.status != 200:
            raise UnprocessableEntity(f"its server answered with status {response.status}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnprocessableEntity("its server sent it compressed, which was not asked for")
        too_large = UnprocessableEntity(f"it has more than {self._config.max_bytes:,} bytes")
        num_left = self._config.max_bytes
        if (response.content_length or 0) > num_left:
            raise too_large
        with self._folder.new_file(url) as write:
            async for piece in response.content.iter_chunked(_PIECE_BYTES):
                num_left -= len(piece)
                if num_left < 0:
                    raise too_large
                await asyncio.to_thread(write, piece)


class _CheckedResolver(AbstractResolver):
    """Resolves hosts whose addresses are all allowed. The connector connects to nothing else."""

    def __init__(self, rules: FetchRules, resolver: AbstractResolver | None) -> None:
        self._rules = rules
        self._resolver = resolver or _SystemResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises: _NotPublic, _Transient."""
        try:
            found = await self._resolver.resolve(host, port, family)
        except OSError as exc:
            if isinstance(exc, socket.gaierror) and exc.errno == socket.EAI_AGAIN:
                raise _Transient(NO_PUBLIC_ADDRESS) from exc
            raise _NotPublic("the name cannot be resolved") from exc
        refused = [result["host"] for result in found if not self._rules.is_allowed(result["host"])]
        if refused or not found:
            raise _NotPublic(f"it resolves to {', '.join(refused) or 'nothing'}")
        return found

    async def close(self) -> None:
        """End the resolver."""
        await self._resolver.close()


class _SystemResolver(AbstractResolver):
    """Asks the system, on threads of its own: a name server that never answers blocks them for half a minute."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_RESOLVING_THREADS, thread_name_prefix="batchline-dns")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises: OSError."""
        look_up = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=str(address[0]), port=port, family=kind, proto=protocol, flags=numeric)
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Wait for nothing: a look-up cannot be cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _not_stored(exc: FolderUnwritable) -> ServiceUnavailable:
    """The disk is full, or the like: not the request's fault, and it may pass."""
    logger.error("media cannot be stored: %s", exc)
    return ServiceUnavailable("The media of this request cannot be stored at the moment; try again later")
