"""Code objects taken apart and put together again are the same. Needs no torch, to run on every Python."""

import dis
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tenterhook.platform import assembler
from tenterhook.platform.assembler import Assembly, Instruction, unsupported
from tenterhook.platform.bytecode import Flow, effect
from tests.platform.code_objects import codes

CHECKS = Path(__file__).parents[1] / "selfcheck" / "checks.py"


def test_every_code_object_comes_back_as_it_was():
    count = 0
    for code in codes():
        again = Assembly(code).assemble()
        assert again.co_code == code.co_code, code
        assert again.co_exceptiontable == code.co_exceptiontable, code
        assert list(again.co_positions()) == list(code.co_positions()), code
        assert list(map(id, again.co_consts)) == list(map(id, code.co_consts)), code
        count += 1
    assert count > 1000


def test_the_stack_is_known_at_every_instruction():
    """What the instructions take was put there, along every path that the code itself takes."""
    for k, code in enumerate(codes()):
        if k % 10:
            continue
        assembly = Assembly(code, split=True)
        flow = Flow(assembly)
        assert all(len(found) == effect(one)[0] for one, found in zip(assembly, flow.operands, strict=True)), code


def test_instructions_put_in_run_and_jumps_go_around_them():
    def function(n):
        found = []
        for k in range(n):
            if k % 2:
                continue
            try:
                found.append(10 // (k - 4))
            except ZeroDivisionError:
                found.append(None)
        return found

    code = Assembly(function.__code__, split=True)
    extra = code.local(".extra")
    for one in code[2:]:  # so many that jumps become long ones
        if one.name not in ("PRECALL", "CALL", "KW_NAMES", "CACHE") and one.name not in assembler.JUMPS:
            for _ in range(40):
                code.consts.append(1)
                one.before += [Instruction("LOAD_CONST", len(code.consts) - 1), Instruction("STORE_FAST", extra)]
    code.extra_stack = 1
    truth, plain = function(9), function.__code__
    function.__code__ = code.assemble()
    assert function(9) == truth
    assert len(function.__code__.co_code) > 4000 and set(function.__code__.co_varnames) > set(plain.co_varnames)
    assert {line for *_, line in function.__code__.co_lines()} == {line for *_, line in plain.co_lines()}


def test_a_closure_keeps_its_variables_beside_one_of_ours():
    def outer(a):
        b = a * 2

        def inner(c):
            nonlocal b
            b += c
            return a, b, c

        return inner

    one = outer(1)
    code = Assembly(one.__code__, split=True)
    code.local(".extra")
    one.__code__ = code.assemble()
    assert one(10) == (1, 12, 10) and one(1) == (1, 13, 1)


def test_what_cannot_be_taken_apart_is_said(monkeypatch):
    assert unsupported() == ""
    monkeypatch.setattr(assembler.sys, "version_info", (3, 99, 0))
    assert unsupported() == "cpython 3.99"
    monkeypatch.undo()
    monkeypatch.setattr(assembler.sysconfig, "get_config_var", lambda name: 1)
    assert unsupported() == "a free-threaded build"


def test_arguments_are_what_dis_says():
    def function(self, x, flag):
        self.h = x.mean() if flag > 1 else -x
        return [self.h @ x, (x + 1)[0], print(x, end="")]

    ours = [str(Assembly(function.__code__).argument(one)) for one in Assembly(function.__code__)]
    theirs = [one for one in dis.get_instructions(function) if one.opname not in ("EXTENDED_ARG", "CACHE")]
    for mine, other in zip(ours, theirs, strict=True):
        if other.opname.startswith(("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")) or other.opname in (
            "LOAD_FAST",
            "STORE_FAST",
            "LOAD_CONST",
        ):
            assert mine == str(other.argval), other


def found_by(*arguments):
    done = subprocess.run([sys.executable, str(CHECKS), *arguments], capture_output=True, text=True, timeout=300)
    found = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout + done.stderr
    return found


def test_cpythons_own_tests_pass_where_every_function_is_instrumented():
    if importlib.util.find_spec("test.test_scope") is None:
        pytest.skip("this Python has no tests of its own")
    names = [f"test.test_{name}" for name in ("scope", "with", "named_expressions", "unpack", "super", "listcomps")]
    found = found_by("suite", *names)
    assert [one["name"] for one in found] == names
    for one in found:
        assert not one["bad"] and one["tests"] > 0
    assert sum(one["functions"] for one in found) > 200
    assert sum(one["calls"] for one in found) > 2000


def test_random_programs_tell_of_their_assignments_without_torch():
    (found,) = found_by("programs", "10")
    assert found == {"programs": 10, "bad": {}}
