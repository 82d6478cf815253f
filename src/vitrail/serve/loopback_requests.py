"""Requests to a server on the loopback address: those that a page of another site makes are refused."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def is_loopback_request(headers: Headers) -> bool:
    """Whether the Host header is a loopback name and the Origin header, if any, is the same host and port.

    Any website can make a browser connect to the loopback address, even under its own host name. Programs other than
    browsers send no Origin header.
    """
    host, origin = headers.getlist("host"), headers.getlist("origin")
    try:
        named = len(host) == 1 and urlsplit(f"//{host[0]}").hostname in LOOPBACK_HOSTS
    except ValueError:
        return False
    return named and origin in ([], [f"http://{host[0]}"])
