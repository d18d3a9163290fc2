"""Errors of ours, threads, options: a recording is never in the way of the training."""

import copy
import signal
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

from tenterhook import watch
from tests.conftest import ours
from tests.record.small import batches, net, train


def test_an_error_of_ours_ends_the_recording_and_nothing_else(tmp_path, monkeypatch, capsys, errors_of_ours):
    from tenterhook.record.gather import Gather

    model, data = net(), batches(5)
    plain = train(copy.deepcopy(model), data)

    def fail(self, places, tensor, has_version=True):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Gather, "add", fail)
    with watch(model, to=tmp_path / "run", every=1) as run:
        assert train(model, data) == plain
    said = capsys.readouterr().err
    assert said.count("planted") == 1 and "goes on unchanged" in said
    assert "planted" in run.open().rank_info()["failed"]
    assert ours(model) == []
    errors_of_ours.clear()


def test_an_error_of_ours_while_torch_goes_through_its_hooks(tmp_path, monkeypatch, errors_of_ours):
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from tenterhook.record.weights import Weights

    monkeypatch.setattr(Weights, "look", lambda *_: 1 / 0)
    model, seen = net(), []
    with watch(model, to=tmp_path / "run", every=1):
        handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
        train(model, batches(3))
        handle.remove()
    assert len(seen) == 3
    errors_of_ours.clear()


class Late(Exception):
    """What a program's own time limit raises."""


@pytest.fixture
def time_limit():
    def handler(number, frame):
        raise Late

    before = signal.signal(signal.SIGUSR1, handler)
    yield lambda: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_what_a_signal_handler_of_the_program_raises_is_not_swallowed(
    tmp_path, monkeypatch, capsys, time_limit, errors_of_ours
):
    from tenterhook.record.gather import Gather

    monkeypatch.setattr(Gather, "add", lambda *_: time_limit())
    model = net()
    with pytest.raises(Late), watch(model, to=tmp_path / "run", every=1) as run:
        train(model, batches(3))
    assert "recording stopped (Late" in capsys.readouterr().err
    assert run.open().rank_info()["failed"].startswith("Late")
    assert ours(model) == []
    errors_of_ours.clear()


def test_wrong_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="every=0"):
        watch(net(), to=tmp_path, every=0)
    with pytest.raises(ValueError, match=r"activations.*output_grad"):
        watch(net(), to=tmp_path, what=["activations"])
    with pytest.raises(TypeError):
        watch("model", to=tmp_path)


def test_a_program_that_changes_its_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = net()
    with watch(model, to="run", every=1) as run:
        train(model, batches(2))
        monkeypatch.chdir(tmp_path / "elsewhere")
        train(model, batches(2))
    assert len(run.open().steps()) == 4 and "└ tenterhook summary run " in run.verdict()


def test_threads_each_with_a_model(tmp_path):
    import threading

    model = net()
    others = [net() for _ in range(3)]

    def work(other):
        train(other, batches(20))

    with watch(model, to=tmp_path / "run", every=1) as run:
        threads = [threading.Thread(target=work, args=(other,)) for other in others]
        for thread in threads:
            thread.start()
        train(model, batches(20))
        for thread in threads:
            thread.join()
    assert run.open().rank_info()["failed"] is None


def test_threads_open_and_close_watches_of_their_own(tmp_path):
    failed = []

    def work(k):
        try:
            model = net()
            optimizer = torch.optim.Adam(model.parameters())
            for j in range(4):
                with watch(model, to=tmp_path / f"{k}-{j}", every=1):
                    for x, y in batches(15):
                        F.cross_entropy(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
