"""Local models and files need no network: a connection, or a name looked up, is an error here."""

import socket

import pytest

MODEL_AND_TEXT = ("--instruments", "loss,routing", "--window", 29, "--windows", 4)


@pytest.fixture
def no_network(monkeypatch):
    """Addresses that were asked for, each of which ends in an error."""
    asked = []

    def refuse(*address, **_):
        asked.append(address)
        raise OSError("the network is down")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return asked


def test_no_command_opens_a_connection_for_local_files(command, model, text, no_network):
    for arguments in (
        ("check", model),
        ("measure", model, "--text", text, *MODEL_AND_TEXT, "--report", "run.html"),
        ("report", "run.nc", "--out", "again.html"),
        ("compare", "run.nc", "run.nc"),
        ("models",),
    ):
        outcome = command(*arguments)
        assert outcome.code == 0, outcome
    assert no_network == []


def test_the_test_sees_what_a_hub_name_asks_for(command, no_network, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert command("check", "org/name").code == 2
    assert no_network
