// The rows of the matrix: models, their modules in the order in which they run, and blocks that repeat, folded into one.

import type { Finding, Model, Run } from "./answers.ts";
import type { Quantity } from "./state.ts";

export interface Node {
  key: string; // model/site, or that of the first block with + behind it
  model: string;
  site: string;
  label: string;
  kind: string; // its class
  times: number; // > 1: as many blocks that are alike
  children: Node[];
  parent: Node | null;
  depth: number;
  order: number; // when it first ran
}

const ON_PARAMETERS: Quantity[] = ["parameter", "parameter_grad", "ratio"];
export const kindsOf = (show: Quantity): string[] => (show === "ratio" ? ["update", "parameter"] : [show]);
export const key = (model: string, site: string): string => `${model}/${site}`;

/** Of which module a site is a part: `encoder[0]` and `encoder:in[0]` of encoder, `fc.weight` of fc. */
export function owner(site: string, modules: ReadonlySet<string>): string {
  let found = site;
  while (!modules.has(found)) {
    const cut = Math.max(found.lastIndexOf("."), found.lastIndexOf("["), found.lastIndexOf(":"));
    if (cut <= 0) return ".";
    found = found.slice(0, cut);
  }
  return found;
}

export function build(run: Run, show: Quantity): Node[] {
  const whats = new Set(kindsOf(show));
  const first = new Map<string, number>();
  run.places.forEach(([model, site, what], i) => {
    const at = key(model, site);
    if ((what === "output" || !first.has(at)) && !first.has(`${at}\n`)) first.set(at, i);
    if (what === "output") first.set(`${at}\n`, i);
  });
  const models: Model[] = [...run.models];
  for (const [name] of run.places)
    if (!models.some((model) => model.name === name)) models.push({ name, class: "", parameters: null, compiled: false, modules: [] });
  return models.map((model) => {
    const nodes = new Map<string, Node>();
    const make = (site: string, kind: string, above: Node | null, label: string): Node => {
      const node: Node = {
        key: key(model.name, site), model: model.name, site, label, kind, times: 1, children: [], parent: above,
        depth: above ? above.depth + 1 : 0, order: first.get(key(model.name, site)) ?? Infinity,
      };
      above?.children.push(node);
      nodes.set(site, node);
      return node;
    };
    const root = make(".", model.class, null, model.name);
    const modules = new Set(model.modules.map((module) => module.site));
    for (const module of model.modules) {
      if (module.site === "." || nodes.has(module.site)) continue;
      const above = owner(module.site.includes(".") ? module.site.slice(0, module.site.lastIndexOf(".")) : ".", new Set(nodes.keys()));
      const label = above === "." ? module.site : module.site.slice(above.length + 1);
      make(module.site, module.class, nodes.get(above) ?? root, label);
    }
    for (const [name, site, what] of run.places) {
      if (name !== model.name || !whats.has(what) || nodes.has(site)) continue;
      const above = owner(site, modules.size ? modules : new Set(["."]));
      const label = above === "." ? site : site.slice(above.length).replace(/^\./, "");
      make(site, ON_PARAMETERS.includes(show) ? "parameter" : "", nodes.get(above) ?? root, label);
    }
    sort(root);
    fold(root);
    return root;
  });
}

/** In the order in which they ran; those that never did stay behind the one before them. */
function sort(node: Node): number {
  node.children.forEach(sort);
  const own = node.order;
  node.order = Math.min(own, ...node.children.map((child) => child.order));
  let before = -1;
  const orders = new Map(node.children.map((child) => {
    if (child.order !== Infinity) before = child.order;
    return [child, before] as const;
  }));
  node.children.sort((a, b) => orders.get(a)! - orders.get(b)!);
  return node.order;
}

const shape = (node: Node): string => `${node.kind}(${node.children.map((c) => `${c.label}:${shape(c)}`).join()})`;

/** Three and more neighbours with numbers for names, which are built alike, become one row that can be opened. */
function fold(node: Node): void {
  const found: Node[] = [];
  for (let i = 0; i < node.children.length; ) {
    const child = node.children[i]!;
    let end = i + 1;
    if (/^\d+$/.test(child.label) && child.children.length) {
      const alike = shape(child);
      while (end < node.children.length && /^\d+$/.test(node.children[end]!.label) && shape(node.children[end]!) === alike) end++;
    }
    const blocks = node.children.slice(i, end);
    if (blocks.length < 3 || node.times > 1) found.push(...blocks);
    else {
      const group: Node = {
        ...child, key: `${child.key}+`, label: `${child.label} … ${blocks[blocks.length - 1]!.label}`, times: blocks.length, children: blocks,
      };
      for (const block of blocks) block.parent = group;
      found.push(group);
    }
    i = end;
  }
  node.children = found;
  for (const child of found) {
    child.depth = node.depth + 1;
    fold(child);
  }
}

/** Whether a row is open unless somebody has changed it: not where blocks repeat, nor far below in a large model. */
export function isOpen(node: Node, toggled: ReadonlySet<string>, large: boolean): boolean {
  const usually = node.times === 1 && (node.parent?.times ?? 1) === 1 && !(large && node.depth >= 2);
  return usually !== toggled.has(node.key);
}

/** The rows that are to be seen, top to bottom; with a search, those that match and all above them. */
export function visible(roots: Node[], toggled: ReadonlySet<string>, find = ""): Node[] {
  const large = size(roots) > 80;
  const found: Node[] = [];
  const words = find.toLowerCase();
  const matches = (node: Node): boolean => `${node.site} ${node.kind}`.toLowerCase().includes(words);
  const under = (node: Node): boolean => matches(node) || node.children.some(under);
  const walk = (node: Node): void => {
    if (words && !under(node)) return;
    found.push(node);
    if (words || isOpen(node, toggled, large)) node.children.forEach(walk);
  };
  roots.forEach(walk);
  return found;
}

export function size(nodes: Node[]): number {
  return nodes.reduce((sum, node) => sum + 1 + size(node.children), 0);
}

export function all(nodes: Node[]): Node[] {
  return nodes.flatMap((node) => [node, ...all(node.children)]);
}

/** The keys of what has to be opened for a site to be seen. */
export function pathTo(roots: Node[], wanted: string, toggled: ReadonlySet<string>): string[] {
  const large = size(roots) > 80;
  const node = all(roots).find((one) => one.key === wanted);
  const found: string[] = [];
  for (let above = node?.parent ?? null; above; above = above.parent) if (!isOpen(above, toggled, large)) found.push(above.key);
  return found;
}

const LEVELS = { note: 0, warn: 1, error: 2 } as const;
export type Severity = keyof typeof LEVELS;

/** The worst finding at each row or anywhere below it. */
export function badges(roots: Node[], findings: Finding[]): Map<string, Severity> {
  const byKey = new Map(all(roots).filter((n) => n.times === 1).map((node) => [node.key, node]));
  const found = new Map<string, Severity>();
  for (const { model, site, severity } of findings) {
    if (model === null || site === null) continue;
    const sites = new Set([...byKey.values()].filter((node) => node.model === model).map((node) => node.site));
    const start = byKey.get(key(model, sites.has(site) ? site : owner(site, sites)));
    for (let node: Node | null = start ?? null; node; node = node.parent) {
      const known = found.get(node.key);
      if (known === undefined || LEVELS[severity] > LEVELS[known]) found.set(node.key, severity);
    }
  }
  return found;
}
