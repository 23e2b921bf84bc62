"""The metrics endpoint: found, scraped, closed; and the file by which Prometheus finds it."""

import http.client
import json
import logging
import socket
import struct
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_for

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

    def serve(port=0, host="127.0.0.1", page=page, **options):
        started.append(MetricsServer(page, host=host, port=port, **options))
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


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("name%5B%5D=train_layer_grad_norm", {"train_layer_grad_norm"}),
        ("name%5b%5d=train_loss&name[]=train_layer_grad_norm", {"train_loss", "train_layer_grad_norm"}),
        ("name[]=train_loss&name[]=nobody&name[]=", {"train_loss"}),
        ("name[]=nobody", set()),
        ("name=train_loss&other[]=x", None),
    ],
)
def test_a_slower_job_scrapes_what_it_names(serve, page, query, found):
    """However a scraper encodes `name[]`, it gets what it names; unknown names give nothing, and no error."""
    page.set("train_layer_grad_norm", 1.0, "h.0")
    status, _, body = get(serve(), f"/metrics?{query}")
    assert status == 200
    if found is None:
        assert body == page.render()
    else:
        assert {family.name for family in text_string_to_metric_families(body.decode())} == found


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


def connect(server, said=b"", *, narrow=False):
    """A scraper that says so much and no more; a `narrow` one takes few bytes at a time."""
    client = socket.socket()
    if narrow:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(5)
    client.connect((server.host, server.port))
    client.sendall(said)
    return client


def widen(page):
    """More text than the buffers of a connection take: whoever sends it has to wait for the reader."""
    for layer in range(30_000):
        page.set("train_layer_grad_norm", 1.0, f"a.layer.with.a.long.name.{layer}")
    return len(page.render())


def answering(server):
    """Threads that are busy with a connection, and those connections."""
    threads = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
    return len(threads), len(server._server._opened)


HANGING = {
    "silent": [(b"", False)],
    "fifty silent": [(b"", False)] * 50,
    "half a line": [(b"GET /metrics HT", False)],
    "no end of headers": [(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n", False)],
    "never reads": [(b"GET /metrics HTTP/1.1\r\n\r\n", True)],
    "all of them": [(b"", False), (b"GET /me", False), (b"GET /metrics HTTP/1.0\r\n\r\n", True)] * 5,
}


@pytest.mark.parametrize("kind", HANGING)
def test_who_hangs_holds_up_nobody_and_is_cut_off(serve, page, kind):
    """While scrapers hang the next one is answered whole; later they are cut off, and no thread of theirs is left."""
    size = widen(page) if any(narrow for _, narrow in HANGING[kind]) else 0
    server = serve(longest_seconds=0.5)
    clients = [connect(server, said, narrow=narrow) for said, narrow in HANGING[kind]]
    try:
        status, _, body = get(server)
        assert status == 200
        assert len(body) >= size
        wait_for(lambda: answering(server) == (0, 0))
        assert get(server)[0] == 200
    finally:
        for client in clients:
            client.close()


def test_who_trickles_is_cut_off_too(serve):
    """One byte at a time keeps no connection open: what counts is its age, not its silence."""
    server = serve(longest_seconds=0.3)
    with connect(server, b"GET /metrics HTTP/1.1\r\nX: ") as client:

        def cut_off():
            try:
                client.sendall(b"x")
            except ConnectionError:
                return True
            return False

        wait_for(cut_off)
    wait_for(lambda: answering(server) == (0, 0))


def test_a_reader_of_one_byte_at_a_time_holds_up_nobody(serve, page):
    """Between two bytes of a slow reader others are answered, and it gets the page in the end if it is in time."""
    page.set("train_step", 1)
    server = serve()
    with connect(server, b"GET /metrics HTTP/1.0\r\n\r\n", narrow=True) as slow:
        read = slow.recv(1)
        for _ in range(20):
            assert get(server)[0] == 200
            read += slow.recv(1)
        while more := slow.recv(1):
            read += more
    assert read.endswith(page.render())


def test_the_end_does_not_wait_for_who_hangs(serve, page):
    """`close` returns while scrapers hang, and cuts them off: their threads end too."""
    widen(page)
    server = serve(longest_seconds=3600.0)
    clients = [connect(server), connect(server, b"GET /met"), connect(server, b"GET /metrics HTTP/1.0\r\n\r\n")]
    wait_for(lambda: answering(server) == (3, 3))
    inner = server._server
    server.close()
    wait_for(lambda: not inner._opened)
    for client in clients[:2]:
        assert client.recv(1) == b""
    for client in clients:
        client.close()
    wait_for(lambda: not [thread for thread in threading.enumerate() if "process_request" in thread.name])


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


def test_p22_what_a_killed_job_left_half_written_goes(tmp_path):
    """The draft of a job that was killed while it announced itself is removed by its next start, and nobody else's."""
    folder = tmp_path / "targets"
    folder.mkdir()
    drafts = [folder / f".{name}.json.{'ab' * 8}" for name in ("gpt-0-0", "gpt-0-1", "gpt-0-0.json.x-0")]
    for draft in drafts:
        draft.touch()
    Target(tmp_path, run="gpt-0", rank="0", address="node:1").remove()
    assert sorted(folder.iterdir()) == sorted(drafts[1:])


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
