"""The metrics endpoint: found, scraped, closed; and the file by which Prometheus finds it."""

import http.client
import json
import logging
import socket
import struct

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporter.page import Page
from exporter.serving import CONTENT_TYPE, MetricsServer, Target, local_address


@pytest.fixture
def page():
    """A page with a loss on it."""
    page = Page(run="gpt-0")
    page.set("train_loss", 2.5)
    return page


@pytest.fixture
def serve(page):
    """Start servers; all are closed at the end."""
    started = []

    def serve(port=0, host="127.0.0.1", page=page):
        started.append(MetricsServer(page, host=host, port=port))
        return started[-1]

    yield serve
    for server in started:
        server.close()


def get(server, path="/metrics", method="GET"):
    """One request: status, headers, body."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=5)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def test_the_page_is_served_as_it_is(serve, page):
    """A scrape gets the page's text, whole, with the content type of format 0.0.4."""
    server = serve()
    status, headers, body = get(server)
    assert (status, body) == (200, page.render())
    assert headers["Content-Type"] == CONTENT_TYPE
    assert int(headers["Content-Length"]) == len(body)
    page.set("train_loss", 3.5)
    assert b"} 3.5\n" in get(server)[2]


def test_names_in_the_query_choose_families(serve):
    """`?name[]=` gives those families only, as in Prometheus's own clients."""
    body = get(serve(), "/metrics?name[]=train_loss&name[]=train_steps_total&x=1")[2].decode()
    assert {family.name for family in text_string_to_metric_families(body)} == {"train_loss", "train_steps"}


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/commands", "/../metrics"])
def test_nothing_else_is_served(serve, path):
    """Any other path is 404."""
    assert get(serve(), path)[0] == 404


def test_no_port_of_the_job_takes_anything(serve):
    """A request that would bring something is not understood."""
    assert get(serve(), method="POST")[0] == 501


def test_a_port_that_is_taken_gives_another_and_says_so(serve, caplog):
    """Two jobs with one port give two endpoints, and one warning that names both ports (case P21)."""
    first = serve()
    with caplog.at_level(logging.WARNING):
        second = serve(first.port)
    assert second.port not in (None, first.port)
    assert [get(server)[0] for server in (first, second)] == [200, 200]
    (record,) = caplog.records
    assert f"127.0.0.1:{first.port} cannot be had" in record.getMessage()
    assert f"on port {second.port} instead" in record.getMessage()


@pytest.mark.parametrize("host", ["192.0.2.1", "256.0.0.1"])
def test_without_any_port_there_is_no_endpoint(serve, host, caplog):
    """An address that is not ours costs the endpoint and one warning, and not the job (case P21)."""
    server = serve(9401, host)
    assert server.port is None
    (record,) = caplog.records
    assert "no endpoint" in record.getMessage()
    server.close()


@pytest.mark.parametrize("port", [65_536, -1])
def test_a_port_that_is_none_gives_another(serve, port):
    """A number beyond the range of ports, as port + rank can be, gives another port."""
    assert get(serve(port))[0] == 200


def test_a_closed_port_can_be_had_again(serve):
    """After `close` the same port is served by the next one, even right after a scrape; closing twice is nothing."""
    first = serve()
    assert get(first)[0] == 200
    first.close()
    first.close()
    second = serve(first.port)
    assert second.port == first.port
    assert get(second)[0] == 200


def test_a_closed_server_answers_nobody(serve):
    """After `close` a connection is refused."""
    server = serve()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        get(server)


def test_an_idle_connection_holds_up_nobody(serve):
    """A scraper that says nothing, or half a request, does not keep another one waiting, nor the end."""
    server = serve()
    with (
        socket.create_connection((server.host, server.port)),
        socket.create_connection((server.host, server.port)) as half,
    ):
        half.sendall(b"GET /metrics HT")
        assert get(server)[0] == 200
        server.close()


def test_a_scraper_that_hangs_up_leaves_no_traceback(serve, page, capfd):
    """A connection reset in the middle of an answer is nothing to tell on stderr."""
    for layer in range(20_000):
        page.set("train_layer_grad_norm", 1.0, f"layer.{layer}")
    server = serve()
    client = socket.create_connection((server.host, server.port))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    client.recv(1)
    client.close()
    assert get(server)[0] == 200
    server.close()
    assert capfd.readouterr().err == ""


def test_an_address_of_version_6(serve):
    """The loopback address of IPv6 is served too."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert get(serve(host="::1"))[0] == 200


def test_a_target_is_what_file_sd_reads(tmp_path):
    """The entry holds one address with run and rank, in a file of its own per process; removing it twice is nothing."""
    targets = [Target(tmp_path, run="gpt-0", rank=rank, address=f"node:940{rank}") for rank in ("0", "1")]
    path = tmp_path / "targets" / "gpt-0-1.json"
    assert json.loads(path.read_text()) == [{"targets": ["node:9401"], "labels": {"run": "gpt-0", "rank": "1"}}]
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["gpt-0-0.json", "gpt-0-1.json"]
    targets[1].remove()
    targets[1].remove()
    assert [entry.name for entry in path.parent.iterdir()] == ["gpt-0-0.json"]


def test_a_new_target_takes_the_place_of_the_old(tmp_path):
    """A restarted job's address replaces the one that it had, and leaves no draft beside it."""
    for port in (1, 2):
        Target(tmp_path, run="gpt-0", rank="0", address=f"node:{port}")
    (path,) = (tmp_path / "targets").iterdir()
    assert json.loads(path.read_text())[0]["targets"] == ["node:2"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "127.0.0.1:9401"), ("node7", "node7:9401"), ("::1", "[::1]:9401")]
    + [(host, f"{socket.gethostname()}:9401") for host in ("", "0.0.0.0", "::")],  # noqa: S104 - compared, not bound
)
def test_prometheus_is_told_a_name_that_it_can_reach(host, expected):
    """A server bound to all addresses is told by the host's name, IPv6 addresses in brackets."""
    assert local_address(host, 9401) == expected
