"""What isolates the light tests: an own Hub cache, no token, a fixed terminal, only loopback."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.light.hub_server import HubServer

_NOWHERE = "http://127.0.0.1:9"
_UNSET = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE",
          "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_CACHE", "HF_DEBUG", "FORCE_COLOR",
          "ALL_PROXY", "all_proxy", "http_proxy", "https_proxy", "no_proxy", "AOQUANT_DEBUG")  # fmt: skip


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Set the environment of a test and of the processes it starts, and give its HF_HOME.

    Proxies that lead nowhere keep child processes off the network; HF_ENDPOINT leads nowhere until a test
    sets it.
    """
    for name in _UNSET:
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("hf_home")
    for name, value in {
        "HF_HOME": str(home),
        "HF_ENDPOINT": _NOWHERE,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        "HTTP_PROXY": _NOWHERE,
        "HTTPS_PROXY": _NOWHERE,
        "NO_PROXY": "127.0.0.1,localhost",
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "TERM": "dumb",
    }.items():
        monkeypatch.setenv(name, value)
    return home


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections of this process to anything but this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            host = str(address[0])
            if host != "localhost" and not ipaddress.ip_address(host).is_loopback:
                raise ConnectionRefusedError(f"light tests stay on this machine, and {host} is not it")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """An empty Hub, which HF_ENDPOINT of child processes names.

    huggingface_hub reads HF_ENDPOINT when it is first imported: in this process that may have happened
    already.
    """
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
