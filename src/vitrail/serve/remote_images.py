"""Images at http and https addresses, without access to the server's own network.

A request could otherwise make the server connect to services that only it reaches. Every host name is resolved once;
all of its addresses must be public, and the connection goes to a checked address, so a second resolution cannot
change it. Redirects are followed by the same rules. Proxies of the environment are not used.
"""

import base64
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from vitrail.serve.openai_schema import (
    APIError,
    ChatCompletionRequest,
    EmbeddingInput,
    EmbeddingRequest,
    ImagePart,
    ImageURL,
    VideoFramesPart,
)

REDIRECTS = (301, 302, 303, 307, 308)
MAX_URL_CHARACTERS = 2048
READ_BYTES = 1 << 16
PORTS = {"http": 80, "https": 443}
# Ranges that lead to other networks, or to IPv4 addresses inside of IPv6 ones, and that `is_global` accepts.
REFUSED_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        (
            "64:ff9b::/96",  # NAT64
            "64:ff9b:1::/48",  # NAT64 of a local network
            "2002::/16",  # 6to4
            "2001::/32",  # Teredo
            "fec0::/10",  # site-local
            "192.88.99.0/24",  # relays of 6to4
        ),
    )
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], list[str]]
AddressCheck = Callable[[Address, int], bool]


def is_public_address(address: Address, port: int) -> bool:
    """Whether an address is on the public internet and the port is that of a web server."""
    if isinstance(address, ipaddress.IPv6Address) and (address.ipv4_mapped or address.scope_id):
        return False
    if address.is_multicast or address.is_reserved or address.is_loopback or address.is_link_local:
        return False
    if address.is_private or address.is_unspecified or not address.is_global:
        return False
    refused = any(address in network for network in REFUSED_NETWORKS if network.version == address.version)
    return not refused and port in PORTS.values()


def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class RemoteLimits(NamedTuple):
    """Limits of the remote images of one request: bytes of an image, seconds of all, redirects of one."""

    max_bytes: int = 20 << 20
    seconds: float = 15.0
    max_redirects: int = 3


class RemoteImageError(Exception):
    """A remote image that cannot or must not be read."""


@dataclass
class RemoteImageReader:
    """Read files at http and https addresses that `is_allowed` accepts."""

    limits: RemoteLimits = field(default_factory=RemoteLimits)
    resolve: Resolver = resolve_host
    is_allowed: AddressCheck = is_public_address
    tls: ssl.SSLContext | None = None

    def read(self, url: str, deadline: float | None = None) -> bytes:
        """Return the content of a URL. Raises RemoteImageError."""
        deadline = time.monotonic() + self.limits.seconds if deadline is None else deadline
        for _ in range(self.limits.max_redirects + 1):
            target = parse_url(url)
            found = self._request(target, deadline)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
            if target.scheme == "https" and not url.startswith("https:"):
                raise RemoteImageError("a redirect leads from https to http")
        raise RemoteImageError(f"there are more than {self.limits.max_redirects} redirects")

    def _request(self, target: SplitResult, deadline: float) -> bytes | str:
        """Request a URL and return its content, or the address that it redirects to."""
        host, port = target.hostname or "", target.port or PORTS[target.scheme]
        link = self._connect(host, port, deadline)
        stop = threading.Timer(max(0.0, deadline - time.monotonic()), _shut_down, [link])  # also ends slow headers
        stop.daemon = True
        stop.start()
        try:
            if target.scheme == "https":
                link = (self.tls or ssl.create_default_context()).wrap_socket(link, server_hostname=host)
            connection = http.client.HTTPConnection(host, port)
            connection.default_port = PORTS[target.scheme]
            connection.sock = link  # the checked address: the connection resolves nothing itself
            path = f"{target.path or '/'}{'?' + target.query if target.query else ''}"
            connection.request("GET", path, headers={"Accept": "image/*", "Connection": "close"})
            answer = connection.getresponse()
            if answer.status in REDIRECTS and (location := answer.getheader("Location")):
                return location
            if answer.status != 200:
                raise RemoteImageError(f"the status is {answer.status}")
            if answer.getheader("Content-Encoding", "identity") != "identity":
                raise RemoteImageError("the content is compressed")
            return self._read_content(answer, deadline)
        except (OSError, ValueError, http.client.HTTPException) as error:
            if time.monotonic() >= deadline:
                raise RemoteImageError(f"it takes more than {self.limits.seconds:g} s") from None
            raise RemoteImageError(f"it cannot be read: {type(error).__name__}") from None
        finally:
            stop.cancel()
            link.close()

    def _read_content(self, answer: http.client.HTTPResponse, deadline: float) -> bytes:
        too_large = RemoteImageError(f"it has more than {self.limits.max_bytes:,} bytes")
        if answer.length is not None and answer.length > self.limits.max_bytes:
            raise too_large
        parts, size = [], 0
        while part := answer.read1(READ_BYTES):
            parts.append(part)
            size += len(part)
            if size > self.limits.max_bytes:
                raise too_large
        if time.monotonic() >= deadline:
            raise TimeoutError
        if answer.length:
            raise RemoteImageError(f"{answer.length:,} bytes are missing")
        return b"".join(parts)

    def _connect(self, host: str, port: int, deadline: float) -> socket.socket:
        """Connect to a checked address of a host."""
        addresses = self._resolve(host, port, deadline)
        if not addresses or not all(self.is_allowed(address, port) for address in addresses):
            raise RemoteImageError("the host is not on the public internet, or the port is not 80 or 443")
        for address in addresses:
            link = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
            try:
                link.settimeout(max(0.001, deadline - time.monotonic()))
                link.connect((str(address), port))
                return link
            except OSError:
                link.close()
        raise RemoteImageError("the host does not answer")

    def _resolve(self, host: str, port: int, deadline: float) -> list[Address]:
        """Resolve a host within the time limit."""
        found: list[list[str]] = []

        def resolve() -> None:
            with contextlib.suppress(OSError, UnicodeError, ValueError):
                found.append(self.resolve(host, port))

        thread = threading.Thread(target=resolve, daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()))
        if not found:
            raise RemoteImageError("the host name is not found")
        try:
            return [ipaddress.ip_address(address) for address in found[0]]
        except ValueError:
            raise RemoteImageError("the host has an invalid address") from None


def _shut_down(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def parse_url(url: str) -> SplitResult:
    """Split a URL, and check that it is http or https, without a user, and not too long."""
    if len(url) > MAX_URL_CHARACTERS or any(ord(char) <= 32 or ord(char) >= 127 for char in url):
        raise RemoteImageError(f"the URL is not one of at most {MAX_URL_CHARACTERS:,} ASCII characters without spaces")
    try:
        found = urlsplit(url)
        host, _ = found.hostname, found.port
    except ValueError:
        raise RemoteImageError("the URL is invalid") from None
    if found.scheme not in PORTS or not host:
        raise RemoteImageError("the URL is not one of http or https")
    if "@" in found.netloc or "\\" in found.netloc or "%" in found.netloc:
        raise RemoteImageError("the URL has a user, or a host that is no name")
    return found


# ---- requests ---------------------------------------------------------------------------------------------------


def is_remote(url: str) -> bool:
    """Whether a URL is one of http or https."""
    return url[:8].lower().startswith(("http://", "https://"))


def find_remote_images(request: ChatCompletionRequest | EmbeddingRequest) -> Iterator[tuple[ImageURL, str]]:
    """Yield the remote images of a request, with their places."""
    for image, param in _find_images(request):
        if is_remote(image.url):
            yield image, f"{param}.url"


def _find_images(request: ChatCompletionRequest | EmbeddingRequest) -> Iterator[tuple[ImageURL, str]]:
    if isinstance(request, EmbeddingRequest):
        for index, one in enumerate(request.input if isinstance(request.input, list) else [request.input]):
            if isinstance(one, EmbeddingInput):
                yield one.image_url, f"input[{index}].image_url"
        return
    for index, message in enumerate(request.messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            where = f"messages[{index}].content[{place}]"
            if isinstance(part, ImagePart):
                yield part.image_url, f"{where}.image_url"
            elif isinstance(part, VideoFramesPart):
                yield from ((image, f"{where}.video_frames[{i}]") for i, image in enumerate(part.video_frames))


def download_images(
    request: ChatCompletionRequest | EmbeddingRequest, reader: RemoteImageReader, max_items: int
) -> None:
    """Replace the remote images of a request by data URLs."""
    deadline = time.monotonic() + reader.limits.seconds
    found = list(find_remote_images(request))
    if len(found) > max_items:
        raise APIError(f"the request has more than {max_items} images", param=found[max_items][1])
    for image, param in found:
        try:
            content = reader.read(image.url, deadline)
        except RemoteImageError as error:
            raise APIError(f"the image at {image.url[:200]} is not read: {error}", param=param) from None
        image.url = f"data:application/octet-stream;base64,{base64.b64encode(content).decode()}"
