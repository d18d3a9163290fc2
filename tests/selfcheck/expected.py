"""Which of CPython's own tests are run, and which of them fail where every function is instrumented."""

MODULES = """
abc asyncgen augassign baseexception bdb binop bool builtin call class code codeop collections compare
contains context contextlib contextlib_async contextvars copy copyreg coroutines dataclasses decorators
defaultdict descr descrtut dict dictcomps dictviews dis doctest dynamic dynamicclassattribute enum enumerate
except_star exception_group exception_hierarchy exception_variations exceptions extcall fnmatch frame fstring
funcattrs functools generator_stop generators genericalias genexps getopt global grammar graphlib inspect
int_literal isinstance iter iterlen keyword keywordonlyarg linecache list listcomps metaclass monitoring
named_expressions opcache opcodes operator ordered_dict patma pdb peepholer positional_only_arg pprint print
property raise range reprlib richcmp scope setcomps slice sort string string_literals subclassinit sum super
syntax sys_setprofile sys_settrace textwrap threading_local trace traceback tuple type_aliases
type_annotations type_cache type_params typechecks types typing unary unpack unpack_ex userdict userlist
userstring weakref weakset with yield_from flufl
"""

EXPECTED: dict[str, list[str]] = {}
