"""The server, over the network: who may ask, what is told, and that nothing that is asked takes it down."""

import http.client
import json
import socket
import threading
from contextlib import closing
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenterhook import open_run
from tenterhook.view import serve
from tenterhook.view.guard import host_of, names_of
from tests.view.made import Made, finding


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("20260101T000000Z-one", "20260102T000000Z-two"):
        Made(folder / name).add(4, findings=[finding(10)]).end()
    (folder / "secret.json").write_text('{"secret": 1}')
    return folder


@pytest.fixture(scope="module")
def server(runs, built_page):
    with serve.Server(open_run(runs / "20260101T000000Z-one"), token="a token").beside() as server:
        yield server


def ask(server, path, token="a token", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    if token is not None:
        path += f"{'&' if '?' in path else '?'}token={quote(token)}"
    with closing(connection):
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()


def test_the_page_and_its_headers(server):
    status, headers, body = ask(server, "/")
    assert status == 200 and b"<title>tenterhook</title>" in body
    policy = headers["content-security-policy"]
    assert (
        "default-src 'none'" in policy and "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    )
    assert headers["referrer-policy"] == "no-referrer" and headers["x-content-type-options"] == "nosniff"
    assert not any(name.lower().startswith("access-control") for name in headers)


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/events", "/api/answer/run", "/nowhere"])
@pytest.mark.parametrize("token", [None, "", "a toke", "a token ", "A TOKEN", "ä"])
def test_nothing_without_the_token(server, path, token):
    status, _, body = ask(server, path, token)
    assert status == 403 and b"token is missing or wrong" in body


def test_two_tokens_are_none(server):
    assert ask(server, "/api/runs?token=x")[0] == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[::2]"])
def test_a_name_of_another_machine_is_refused(server, host):
    status, _, body = ask(server, "/api/runs", Host=host)
    assert status == 403 and b"Host header" in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1234", "LOCALHOST", "[::1]:8"])
def test_names_of_this_machine(server, host):
    assert ask(server, "/api/runs", Host=host)[0] == 200


def test_hosts():
    assert host_of("[fe80::1]:80") == "fe80::1" and host_of("a:1") == "a"
    assert "box.lan" in names_of("box.lan") and "evil" not in names_of("0.0.0.0")


def test_answers(server):
    status, _, body = ask(server, "/api/answer/run")
    assert status == 200 and json.loads(body)["name"] == "20260101T000000Z-one"
    assert json.loads(ask(server, "/api/answer/run?run=20260102T000000Z-two")[2])["name"] == "20260102T000000Z-two"
    assert json.loads(ask(server, "/api/runs")[2])["names"] == ["20260102T000000Z-two", "20260101T000000Z-one"]
    assert ask(server, "/api/answer/matrix/output")[1]["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    "run", ["..", ".", "/etc", "../secret.json", "20260101T000000Z-one/rank-0", "%00", "C:\\", "secret.json"]
)
def test_paths_stay_in_the_folder_of_runs(server, run):
    status, _, body = ask(server, f"/api/answer/run?run={quote(run, safe='%')}")
    assert status == 404 and b"there is no run" in body and b'secret": 1' not in body


@pytest.mark.parametrize("rank", ["x", "-1", "1e3", "²", "99999999999", "7"])
def test_ranks_that_are_none(server, rank):
    assert ask(server, f"/api/answer/run?rank={quote(rank)}")[0] == 404


def test_differences_are_those_to_another_run_or_rank(server):
    two = "with=20260102T000000Z-two"
    assert json.loads(ask(server, f"/api/answer/differences?{two}")[2])["kinds"]["output"]["differ"] == 0
    status, headers, _ = ask(server, f"/api/answer/differences/output?{two}&with_rank=0&rank=0")
    assert status == 200 and headers["content-type"] == "application/octet-stream"
    assert ask(server, "/api/answer/differences?with=20260101T000000Z-one")[0] == 200  # from itself
    for query in ("", "with=nowhere", "with=../secret.json", f"{two}&with_rank=5", f"{two}&with_rank=x"):
        assert ask(server, f"/api/answer/differences?{query}")[0] == 404


def test_pages_that_compare_the_other_way_round_do_not_wait_for_each_other(server):
    one, two = "20260101T000000Z-one", "20260102T000000Z-two"
    found = []
    ways = [f"/api/answer/differences?run={a}&with={b}" for a, b in ((one, two), (two, one))] * 10
    threads = [threading.Thread(target=lambda path=path: found.append(ask(server, path)[0])) for path in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [200] * 20


def test_several_runs_from_anywhere(tmp_path, built_page):
    given = [open_run(Made(tmp_path / folder / "run").add(many).end()) for folder, many in (("x", 2), ("y", 3))]
    with serve.Server(given, token="t").beside() as server:
        assert server.address.endswith("/?token=t#with=run%20%282%29")
        assert json.loads(ask(server, "/api/runs", "t")[2]) == {"first": "run", "names": ["run (2)", "run"]}
        for name, many in (("", 2), ("run", 2), ("run (2)", 3)):
            told = json.loads(ask(server, f"/api/answer/run?run={quote(name)}", "t")[2])
            assert (told["name"], told["sampled"]) == (name or "run", many)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(server, method):
    assert ask(server, "/api/answer/run", method=method)[0] == 405


PARTS = st.sampled_from(
    ["run", "steps", "matrix", "output", "site", "net", "a", "source", "Net", "..", "", "%2e%2e", "\0", "é"]
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(PARTS, st.text(max_size=8)), max_size=5),
    st.dictionaries(
        st.sampled_from(["from", "to", "columns", "rank", "run", "x"]),
        st.one_of(st.floats().map(str), st.text(max_size=12)),
    ),
)
def test_whatever_is_asked_has_an_answer_or_an_error(server, parts, query):
    path = "/".join(quote(part, safe="") for part in parts)
    words = "&".join(f"{k}={quote(v, safe='')}" for k, v in query.items())
    status, _, body = ask(server, f"/api/answer/{path}?{words}")
    assert status in (200, 404, 422)
    if status != 200:
        assert json.loads(body)["error"]


@settings(max_examples=40, deadline=None)
@given(junk=st.binary(max_size=200))
def test_junk_is_refused_and_the_server_goes_on(server, junk):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(junk + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1000)
    assert ask(server, "/api/runs")[0] == 200


def test_hostile_files_give_an_error_and_no_more(tmp_path, built_page):
    good = Made(tmp_path / "good").add(2).end()
    for name, text in {"type": b"[]", "format": b'{"format": "x"}', "deep": b"[" * 10**5, "bytes": b"\xff\xfe"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_bytes(text)
    with serve.Server(open_run(good), token="t").beside() as server:
        for name in ("type", "format", "deep", "bytes"):
            status, _, body = ask(server, f"/api/answer/run?run={name}", "t")
            assert status == 422 and json.loads(body)["error"]
        for file in good.glob("rank-0/*.arrows"):
            file.write_bytes(b"\xff" * 5000)
        for name in ("run", "steps", "matrix/output", "site/net/a"):
            assert ask(server, f"/api/answer/{name}", "t")[0] in (200, 422)
        assert ask(server, "/api/runs", "t")[0] == 200


def test_news_come_while_a_run_grows(tmp_path, built_page):
    made = Made(tmp_path / "run").add(2)
    with serve.Server(open_run(made.folder), token="t").beside() as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", "/api/events?token=t")
        reply = connection.getresponse()
        assert reply.headers["content-type"].startswith("text/event-stream")
        first = reply.readline()
        reply.readline()
        threading.Timer(0.1, lambda: made.add(2)).start()
        second = reply.readline()
        assert first.startswith(b"data: ") and second.startswith(b"data: ") and first != second
        reply.close()
        connection.close()
        made.end()


def test_a_port_that_is_taken_is_said(runs, server, built_page):
    with pytest.raises(serve.NoServer, match="give another --port"):
        serve.Server(open_run(runs), port=server.port)


def test_the_line_for_ssh(monkeypatch):
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert serve.tunnel(8000) is None
    monkeypatch.setenv("USER", "me")
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 5000 10.0.0.2 22")
    assert serve.tunnel(8000) == "ssh -L 8000:127.0.0.1:8000 me@10.0.0.2"
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 5000 10.0.0.2 2222")
    assert serve.tunnel(8000) == "ssh -L 8000:127.0.0.1:8000 -p 2222 me@10.0.0.2"
