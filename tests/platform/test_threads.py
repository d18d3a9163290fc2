import threading

import torch

from tenterhook.platform.threads import in_same_state


def what_holds():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_device(),
    )


def in_a_thread(contexts):
    found = []

    def run():
        from contextlib import ExitStack

        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            found.append(what_holds())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_second_thread_runs_under_what_holds_here():
    plain = what_holds()
    for context in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
    ):
        with context:
            here = what_holds()
            assert here != plain
            assert in_a_thread(in_same_state()) == here, "torch now keeps something else for each thread"
    assert in_a_thread(in_same_state()) == plain
