"""Remote images: which addresses are read, by name, redirect and resolution, and the limits."""

import contextlib
import io
import ipaddress
import shutil
import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2 as httpx
import pytest

from hub.shrunk_checkpoints import write_checkpoint
from serve.test_openai_server import RED, image_message
from vitrail.pipelines import load
from vitrail.serve.openai_schema import APIError, ChatCompletionRequest, parse_request
from vitrail.serve.remote_images import (
    RemoteImageError,
    RemoteImageReader,
    RemoteLimits,
    download_images,
    is_public_address,
)
from vitrail.serve.served_model import ServedModel
from vitrail.serve.server_process import open_server

FILE = io.BytesIO()
RED.save(FILE, "PNG")
PNG = FILE.getvalue()


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("192.0.2.1", False),
        ("192.88.99.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("239.255.255.250", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::93.184.216.34", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", False),
        ("64:ff9b:1::1", False),
        ("2002:7f00:1::", False),
        ("2001:0:1::1", False),
        ("fc00::1", False),
        ("fd12::1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("2001:db8::1", False),
    ],
)
def test_only_public_addresses_are_accepted(address, is_public):
    assert is_public_address(ipaddress.ip_address(address), 443) == is_public
    assert not is_public_address(ipaddress.ip_address(address), 22)


class Handler(BaseHTTPRequestHandler):
    """Pages by path: an image, redirects, and servers that misbehave."""

    hosts: list[str]

    def do_GET(self):
        self.server.hosts.append(self.headers["Host"])  # type: ignore[attr-defined]
        path = self.path
        if path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", path[4:])
            self.end_headers()
        elif path.startswith("/loop"):
            self.send_response(307)
            self.send_header("Location", path + "x")
            self.end_headers()
        elif path == "/slow":
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    time.sleep(0.1)
        elif path == "/drip":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
        elif path == "/endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    self.wfile.write(b"x" * 10_000)
        elif path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x")
        elif path == "/zip":
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip")
            self.end_headers()
        elif path == "/red.png":
            self.send_response(200)
            self.send_header("Content-Length", str(len(PNG)))
            self.end_headers()
            self.wfile.write(PNG)
        else:
            self.send_error(404)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def open_site(tls: ssl.SSLContext | None = None):
    site = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site.daemon_threads = True
    site.hosts = []  # type: ignore[attr-defined]
    if tls is not None:
        site.socket = tls.wrap_socket(site.socket, server_side=True)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    try:
        yield site
    finally:
        site.shutdown()
        site.server_close()


class Names:
    """Resolver with a table. A name can have other addresses at each resolution."""

    def __init__(self, **table):
        self.table, self.asked = table, []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self.table:
            raise socket.gaierror("unknown")
        found = self.table[host]
        return found.pop(0) if found and isinstance(found[0], list) else found


@pytest.fixture
def site():
    with open_site() as found:
        yield found


def build_reader(site, names=None, **limits) -> RemoteImageReader:
    """Return a reader that may connect to the site on the loopback address, and to public addresses."""
    port = site.server_address[1]
    names = names or Names(images=["127.0.0.1"], other=["127.0.0.2"], private=["10.0.0.1"])
    return RemoteImageReader(
        RemoteLimits(**limits),
        names,
        lambda address, asked: (str(address), asked) == ("127.0.0.1", port) or is_public_address(address, asked),
    )


def test_an_image_is_read_from_the_checked_address(site):
    names = Names(images=[["127.0.0.1"], ["169.254.169.254"]])  # another address at the second resolution
    port = site.server_address[1]
    assert build_reader(site, names).read(f"http://images:{port}/red.png") == PNG
    assert names.asked == ["images"] and site.hosts == [f"images:{port}"]
    assert build_reader(site).read(f"http://images:{port}/to//red.png") == PNG


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:1/x",
        "http://other/x",
        "http://private/x",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/x",
        "http://[::ffff:127.0.0.1]/x",
        "http://[64:ff9b::7f00:1]/x",
        "http://2130706433/x",
        "file:///etc/passwd",
        "ftp://images/x",
        "gopher://images/x",
        "http://user@images/x",
        "http://images%2f@127.0.0.1/x",
        "http://unknown/x",
        "http://images:99999/x",
    ],
)
def test_other_addresses_are_refused_directly_and_by_redirect(site, target):
    reader, connected = build_reader(site), []
    resolve = reader.resolve
    # Numbers are resolved as the system does.
    reader.resolve = lambda host, port: (
        resolve(host, port) if host.isalpha() else [one[4][0] for one in socket.getaddrinfo(host, port)]
    )
    check = reader.is_allowed
    reader.is_allowed = lambda address, port: check(address, port) and (connected.append((str(address), port)) or True)
    with pytest.raises(RemoteImageError):
        reader.read(target)
    assert connected == []
    with pytest.raises(RemoteImageError):
        reader.read(f"http://images:{site.server_address[1]}/to/{target}")
    assert set(connected) == {("127.0.0.1", site.server_address[1])} and len(site.hosts) == 1


def test_a_name_with_one_private_address_is_refused(site):
    port = site.server_address[1]
    with pytest.raises(RemoteImageError, match="public"):
        build_reader(site, Names(images=["127.0.0.1", "10.0.0.1"])).read(f"http://images:{port}/red.png")
    rebound = Names(images=[["127.0.0.1"], ["127.0.0.1", "10.0.0.1"]])  # the hop after a redirect is checked again
    with pytest.raises(RemoteImageError, match="public"):
        build_reader(site, rebound).read(f"http://images:{port}/to/http://images:{port}/red.png")
    assert site.hosts == [f"images:{port}"]


@pytest.mark.parametrize(
    ("path", "seconds", "match"),
    [
        ("/slow", 0.5, "more than 0.5 s"),
        ("/drip", 0.5, "more than 0.5 s"),
        ("/endless", 300, "more than 50,000 bytes"),
        ("/short", 300, "cannot be read|missing"),
        ("/zip", 300, "compressed"),
        ("/none", 300, "status is 404"),
        ("/loop", 300, "more than 3 redirects"),
    ],
)
def test_sizes_times_and_redirects_have_limits(site, path, seconds, match):
    reader = build_reader(site, seconds=seconds, max_bytes=50_000)
    with pytest.raises(RemoteImageError, match=match):
        reader.read(f"http://images:{site.server_address[1]}{path}")
    assert len(site.hosts) == (4 if path == "/loop" else 1)


def test_a_slow_resolver_has_a_limit(site):
    reader = build_reader(site, lambda host, port: time.sleep(5) or [], seconds=0.2)
    with pytest.raises(RemoteImageError, match="not found"):
        reader.read("http://images/x")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_certificates_are_checked_against_the_name(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=images"]
    command += ["-addext", "subjectAltName=DNS:images", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(certificate, key)
    with open_site(own) as site:
        port = site.server_address[1]
        reader = build_reader(site, Names(images=["127.0.0.1"], wrong=["127.0.0.1"]))
        with pytest.raises(RemoteImageError, match="SSLCertVerificationError"):
            reader.read(f"https://images:{port}/red.png")
        reader.tls = ssl.create_default_context(cafile=str(certificate))
        assert reader.read(f"https://images:{port}/red.png") == PNG
        with pytest.raises(RemoteImageError, match="SSLCertVerificationError"):
            reader.read(f"https://wrong:{port}/red.png")
        with pytest.raises(RemoteImageError, match="from https to http"):
            reader.read(f"https://images:{port}/to/http://images:{port}/red.png")


def test_requests_with_remote_images(site, tmp_path):
    folder = write_checkpoint("llava-hf/llava-1.5-7b-hf", tmp_path / "tiny")
    model, port = ServedModel("tiny", load(folder)), site.server_address[1]
    local = {"model": "tiny", "messages": image_message(RED), "max_tokens": 8}
    with (
        open_server(model, remote_images=build_reader(site)) as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):

        def ask(image: str):
            content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "what is this?"}]
            return client.post("/chat/completions", json={**local, "messages": [{"role": "user", "content": content}]})

        expected = client.post("/chat/completions", json=local).json()["choices"]
        assert ask(f"http://images:{port}/red.png").json()["choices"] == expected
        assert ask(f"HTTP://images:{port}/to//red.png").json()["choices"] == expected
        for wrong in ("http://private/x", f"http://images:{port}/to/http://other:{port}/red.png", "http://unknown/"):
            answer = ask(wrong)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url"


def test_the_number_of_remote_images_has_a_limit(site):
    part = {"type": "image_url", "image_url": {"url": "http://images/x"}}
    body = httpx.Request("POST", "http://x", json={"model": "x", "messages": [{"role": "user", "content": [part] * 3}]})
    with pytest.raises(APIError, match="more than 2 images") as found:
        download_images(parse_request(ChatCompletionRequest, body.content), build_reader(site), max_items=2)
    assert found.value.param == "messages[0].content[2].image_url.url" and not site.hosts
