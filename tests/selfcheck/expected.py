"""Which of CPython's own tests are run, and which of them fail where every function is instrumented.

Not among them: what takes long or says nothing about code (networks, files, processes), and `dis`, `peepholer` and
`opcache`, which are about the very instructions of a function.
"""

MODULES = """
abc asyncgen augassign baseexception bdb binop bool builtin call class code codeop collections compare
contains context contextlib contextlib_async contextvars copy copyreg coroutines dataclasses decorators
defaultdict descr descrtut dict dictcomps dictviews doctest dynamic dynamicclassattribute enum enumerate
except_star exception_group exception_hierarchy exception_variations exceptions extcall fnmatch frame fstring
funcattrs functools generator_stop generators genericalias genexps getopt global grammar graphlib inspect
int_literal isinstance iter iterlen keyword keywordonlyarg linecache list listcomps metaclass monitoring
named_expressions opcodes operator ordered_dict patma pdb positional_only_arg pprint print
property raise range reprlib richcmp scope setcomps slice sort string string_literals subclassinit sum super
syntax sys_setprofile sys_settrace textwrap threading_local trace traceback tuple type_aliases
type_annotations type_cache type_params typechecks types typing unary unpack unpack_ex userdict userlist
userstring weakref weakset with yield_from flufl
"""

# By the reason: the tests, as MODULE:TEST (MODULE.CLASS.TEST).
EXPECTED = {
    "look at a frame's variables, where ours are (`.here` and `.called`)": [
        "test.test_frame:* (test.test_frame.FrameAttrsTest.test_locals)",
        "test.test_frame:* (test.test_frame.FrameLocalsProxyMappingTests.*",
        "test.test_frame:* (test.test_frame.TestFrameLocals.*",
        "test.test_frame:* (test.test_frame.TestFrameCApi.*",
        "test.test_inspect:test_get*locals*",
        "test.test_inspect:* (test.test_inspect.test_inspect.TestInterpreterStack.test_frame)",
        "test.test_traceback:test_format_locals *",
        "test.test_traceback:test_print (*",
        "test.test_traceback:test_comparison_params_variations *",
        "test.test_grammar:test_funcdef *",
    ],
    "look at the names or the number of variables of a code object": [
        "test.test_code:test_replace *",
        "test.test_inspect:* (test.test_inspect.test_inspect.TestGetClosureVars.*",
    ],
    "count instructions, or know at which byte each is": [
        "test.test_monitoring:* (test.test_monitoring.TestInstallIncrementally.*",
        "test.test_monitoring:* (test.test_monitoring.TestLineAndInstructionEvents.*",
        "test.test_monitoring:test_except_star *",
    ],
    "look at the frame above, or at how deep a traceback is, and find the dispatcher": [
        "test.test_frame:test_sneaky_frame_object *",
        "test.test_monitoring:test_frame_stack *",
        "test.test_traceback:test_clear *",
        "test.test_traceback:test_recursive_traceback*",
        "test.test_exceptions:test_recursion_in_except_handler *",
    ],
    "trace the functions of this file, too": [
        "test.test_sys_settrace:test_no_line_event_after_creating_generator *",
        "test.test_sys_setprofile:test_method_with_c_function *",
        "test.test_sys_setprofile:test_unfinished_generator *",
    ],
    "have a signal arrive at the next instruction, which is one of ours": [
        "test.test_generators:test_raise_and_yield_from *",
    ],
}
