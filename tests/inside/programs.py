"""Random programs, and each with a call of `tell` written into its source wherever a variable is assigned.

    source = program(random.Random(seed))       defines forward(self, x), and the helpers that it calls
    told(source)                                y = x + 2   becomes   y = tell("forward", "y", x + 2)

Needs no torch: `x` may be a number or a tensor.
"""

import ast


class Closing:
    """What the programs use in `with`."""

    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value

    def __exit__(self, *error):
        return error[0] is ValueError


class Writer:
    """Writes one function."""

    def __init__(self, random, name, depth=0):
        self.random, self.name, self.depth = random, name, depth
        self.lines, self.inner = [], []
        self.known = ["x"]
        self.loops = 0

    def pick(self, *choices):
        return self.random.choice(choices)

    def value(self):
        return self.random.choice(self.known)

    def expression(self, depth=0, walrus=True):
        a, b, n = self.value(), self.value(), self.random.randint(2, 5)
        simple = [a, f"{a} + {b} / {n}", f"{a} - {n}", f"{a} * 0.5", f"({a} + {n}) * 0.25"]
        if depth > 1:
            return self.pick(*simple)
        one, other = self.expression(depth + 1, walrus), self.expression(depth + 1, walrus)
        plain = self.expression(depth + 1, False)
        more = [
            f"({one}) - ({other})",
            f"({one}) if k % {n} else ({other})",
            f"[{one}, {other}][{self.pick(0, 1)}]",
            f"sum([t * 0.5 for t in ({plain}, {self.value()})])",
            *([f"({self.pick('v', 'w')} := {one}) * 0.5"] * walrus),  # `y = (v := x)` is the bytecode of `v = y = x`
            f"(lambda t: t * 0.5 + {b})({one})",
            f"max({n}, k) * 0.1 * ({one})",
        ]
        if self.inner:
            more += [self.pick(*self.inner).format(one)] * 2
        return self.pick(*simple, *more, *more)

    def new(self):
        return self.pick("a", "b", "c", "d", "y", "z")

    def learn(self, *names):
        self.known += [name for name in names if name not in self.known]

    def statement(self, indent, depth):
        kinds = "assign assign assign several chain swap grow for while if try with inner"
        kind = self.pick(*kinds.split())
        if depth > 2 and kind not in ("assign", "several", "chain", "swap", "grow"):
            kind = "assign"
        getattr(self, f"_{kind}")(indent, depth)

    def put(self, indent, line):
        self.lines.append("    " * indent + line)

    def block(self, indent, depth):
        known = list(self.known)
        self.put(indent, "k += 1")
        for _ in range(self.random.randint(1, 3)):
            self.statement(indent, depth + 1)
        self.known = known  # it may not have run

    def _assign(self, indent, depth):
        name, made = self.new(), self.expression()
        self.put(indent, f"{name} = {made}")
        self.learn(name)

    def _several(self, indent, depth):
        a, b = self.random.sample(["a", "b", "c", "y", "z"], 2)
        values = self.pick("({}, {})", "[{}, {}]", "iter(({}, {}))").format(self.expression(), self.expression())
        self.put(indent, f"{a}, {b} = {values}")
        self.learn(a, b)

    def _swap(self, indent, depth):
        a, b = self.random.sample(["a", "b", "c", "y", "z"], 2)
        self.put(indent, f"{a}, {b} = {self.expression()}, {self.expression()}")
        self.learn(a, b)

    def _chain(self, indent, depth):
        names = self.random.sample(["a", "b", "c", "y", "z"], self.random.randint(2, 3))
        self.put(indent, f"{' = '.join(names)} = {self.expression()}")
        self.learn(*names)

    def _grow(self, indent, depth):
        name = self.new()
        if name in self.known:
            self.put(indent, f"{name} = {name} * 0.5")
            self.put(indent, f"{name} {self.pick('+', '-', '*')}= {self.pick('0.5', '2', '0.25')}")

    def _for(self, indent, depth):
        name = self.new()
        values = self.pick("({}, {})", "[{}, {}]", "(t * 0.5 for t in ({}, {}))")
        self.put(indent, f"for {name} in {values.format(self.expression(1, False), self.expression(1, False))}:")
        known = list(self.known)
        self.learn(name)
        self.block(indent + 1, depth)
        self.put(
            indent + 1,
            f"k += 1; {self.pick('', 'continue', 'break') if self.random.random() < 0.3 else ''}".rstrip("; "),
        )
        self.known = known

    def _while(self, indent, depth):
        self.loops += 1
        count = f"n{self.depth}{self.loops}"
        self.put(indent, f"{count} = 0")
        self.put(indent, f"while {count} < {self.random.randint(1, 3)}:")
        self.put(indent + 1, f"{count} += 1")
        self.block(indent + 1, depth)

    def _if(self, indent, depth):
        self.put(indent, f"if k % {self.random.randint(2, 3)}:")
        self.block(indent + 1, depth)
        if self.random.random() < 0.6:
            self.put(indent, "else:")
            self.block(indent + 1, depth)

    def _try(self, indent, depth):
        self.put(indent, "try:")
        self.block(indent + 1, depth)
        self.put(indent + 1, f"if k % 2: raise {self.pick('ValueError', 'KeyError')}(k)")
        self.block(indent + 1, depth)
        self.put(indent, "except (ValueError, KeyError) as error:")
        self.block(indent + 1, depth)
        self.put(indent + 1, "k += len(error.args)")
        if self.random.random() < 0.5:
            self.put(indent, "finally:")
            self.block(indent + 1, depth)

    def _with(self, indent, depth):
        name = self.new()
        self.put(indent, f"with Closing({self.expression()}) as {name}:")
        known = list(self.known)
        self.learn(name)
        self.block(indent + 1, depth)
        if self.random.random() < 0.3:
            self.put(indent + 1, "raise ValueError(k)")
        self.known = known

    def _inner(self, indent, depth):
        if self.depth > 1 or indent > 1:
            return self._assign(indent, depth)
        name = f"f{self.depth}{len(self.inner)}"
        kind = self.pick("plain", "closure", "generator")
        writer = Writer(self.random, name, self.depth + 1)
        outer = self.pick(*self.known)
        for _ in range(self.random.randint(1, 4)):
            writer.statement(1, 1)
        self.put(indent, f"def {name}(x, k):")
        if kind == "closure" and outer != "x":
            self.put(indent + 1, f"nonlocal {outer}")
            self.put(indent + 1, f"{outer} = {outer} * 0.5")
            writer.lines, writer.known = ["    o = x * 0.5"], ["o"]
        self.lines += ["    " * indent + line for line in writer.lines]
        if kind == "generator":
            self.put(indent + 1, f"yield {writer.expression()}")
            again = Writer(self.random, name, 3)
            again.known = list(writer.known)
            again.statement(1, 3)
            self.lines += ["    " * indent + line for line in again.lines]
            self.put(indent + 1, f"yield {again.expression()}")
            self.inner.append(f"sum({name}({{}}, k))")
        else:
            self.put(indent + 1, f"return {writer.expression()}")
            self.inner.append(f"{name}({{}}, k)")
        return None


def program(random):
    """The source of a module that defines forward."""
    writer = Writer(random, "forward")
    writer.put(1, "k = 1")
    for _ in range(random.randint(4, 12)):
        writer.statement(1, 0)
    writer.put(1, f"return {writer.expression()} + {' + '.join(writer.known)}")
    return "def forward(self, x):\n" + "\n".join(writer.lines) + "\n"


class _Tell(ast.NodeTransformer):
    """Writes the calls of `tell`."""

    def __init__(self):
        self.path, self.count, self.free = [], 0, [set()]

    def _call(self, name, value):
        path = ast.Constant("/".join(self.path))
        return ast.Call(ast.Name("tell", ast.Load()), [path, ast.Constant(name), value], [])

    def _other(self):
        self.count += 1
        return f"_{self.count}"

    def _after(self, target, name):
        """Gives a target the name of another variable; returns the statements that assign what it takes."""
        if isinstance(target, ast.Name):
            made = ast.Assign([target], self._call(target.id, ast.Name(name, ast.Load())))
            return ast.Name(name, ast.Store()), [made]
        parts = [self._after(part, self._other()) for part in target.elts]
        return ast.Tuple([part for part, _ in parts], ast.Store()), [one for _, more in parts for one in more]

    def visit_FunctionDef(self, node):
        self.path.append(node.name)
        node.body = [one for part in node.body for one in _several(self.visit(part))]
        self.path.pop()
        return node

    def visit_Lambda(self, node):
        self.path.append("lambda")
        self.generic_visit(node)
        self.path.pop()
        return node

    def visit_Assign(self, node):
        node.value = self.visit(node.value)
        whole = self._other()
        made = [ast.Assign([ast.Name(whole, ast.Store())], node.value)]
        for target in node.targets:
            new, after = self._after(target, self._other())
            made += [ast.Assign([new], ast.Name(whole, ast.Load())), *after]
        return made

    def visit_AugAssign(self, node):
        self.generic_visit(node)
        name = node.target.id
        return [node, ast.Assign([ast.Name(name, ast.Store())], self._call(name, ast.Name(name, ast.Load())))]

    def visit_NamedExpr(self, node):
        self.generic_visit(node)
        node.value = self._call(node.target.id, node.value)
        return node

    def visit_For(self, node):
        self.generic_visit(node)
        node.target, after = self._after(node.target, self._other())
        node.body = [*after, *node.body]
        return node

    def visit_With(self, node):
        self.generic_visit(node)
        for item in node.items:
            item.optional_vars, after = self._after(item.optional_vars, self._other())
            node.body = [*after, *node.body]
        return node


def _several(found):
    return found if isinstance(found, list) else [found]


def told(source):
    """The program with the calls in its source."""
    tree = ast.fix_missing_locations(_Tell().visit(ast.parse(source)))
    return ast.unparse(tree)
