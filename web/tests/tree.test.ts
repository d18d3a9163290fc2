import assert from "node:assert/strict";
import { test } from "node:test";
import type { Finding, Run } from "../src/answers.ts";
import { all, badges, build, owner, pathTo, size, visible } from "../src/tree.ts";

const CLASSES: Record<string, string> = { blocks: "ModuleList" };

function run(sites: string[], places: [string, string][] = [], model = "net"): Run {
  const modules = [".", ...sites].map((site) => ({ site, class: CLASSES[site] ?? (/\d$/.test(site) ? "Block" : "Linear"), shapes: null }));
  const listed = places.map(([site, what]) => [model, site, what, "float32"]);
  return { models: [{ name: model, class: "Net", parameters: 1, compiled: false, modules }], places: listed, findings: [], groups: [] } as unknown as Run;
}
const blocks = (many: number): string[] => ["blocks", ...Array.from({ length: many }, (_, i) => [`blocks.${i}`, `blocks.${i}.attn`, `blocks.${i}.mlp`]).flat()];
const finding = (site: string, severity: Finding["severity"]): Finding => ({ model: "net", site, severity }) as Finding;

test("whose part a site is", () => {
  const modules = new Set([".", "fc", "h.0.attn", "a[b]"]);
  assert.equal(owner("fc.weight", modules), "fc");
  assert.equal(owner("h.0.attn[0]", modules), "h.0.attn");
  assert.equal(owner("h.0.attn:in[0]", modules), "h.0.attn");
  assert.equal(owner(".:in[0]", modules), ".");
  assert.equal(owner("a[b]", modules), "a[b]");
  assert.equal(owner("elsewhere", modules), ".");
});

test("modules come in the order in which they ran", () => {
  const [root] = build(run(["head", "stem", "never", "body"], [["stem", "output"], ["body", "output"], ["head", "output"], [".", "output"]]), "output");
  assert.deepEqual(root!.children.map((node) => node.site).filter((site) => site !== "never"), ["stem", "body", "head"]);
});

test("blocks that are alike are one row, which can be opened", () => {
  const roots = build(run(blocks(24)), "output");
  const rows = visible(roots, new Set());
  assert.deepEqual(rows.map((node) => node.label), ["net", "blocks", "0 … 23"]);
  assert.equal(rows[2]!.times, 24);
  assert.equal(visible(roots, new Set([rows[2]!.key])).length, 3 + 24);
  assert.equal(size(roots), 3 + 24 * 3);
});

test("blocks that differ are not folded, nor are two", () => {
  assert.ok(!all(build(run([...blocks(4), "blocks.2.extra"]), "output")).some((node) => node.times > 1 && node.times !== 2));
  assert.ok(all(build(run(blocks(2)), "output")).every((node) => node.times === 1));
});

test("parameters are rows of their modules where these are looked at", () => {
  const [root] = build(run(["fc"], [["fc", "output"], ["fc.weight", "parameter_grad"], ["fc.bias", "parameter_grad"]]), "parameter_grad");
  assert.deepEqual(root!.children[0]!.children.map((node) => node.label), ["weight", "bias"]);
  assert.equal(all(build(run(["fc"], [["fc.weight", "parameter_grad"]]), "output")).length, 2);
});

test("a run without a description has the sites that were measured", () => {
  const one = run([], [["a.b", "output"], ["c", "output"]]);
  one.models = [];
  assert.deepEqual(build(one, "output")[0]!.children.map((node) => node.site), ["a.b", "c"]);
});

test("a search keeps what matches and all above it", () => {
  const rows = visible(build(run(blocks(12)), "output"), new Set(), "7.ATTN");
  assert.deepEqual(rows.map((node) => node.site), [".", "blocks", "blocks.0", "blocks.7", "blocks.7.attn"]);
});

test("badges rise to the rows above, the worst first", () => {
  const roots = build(run([...blocks(5), "head"]), "output");
  const found = badges(roots, [finding("blocks.3.mlp", "warn"), finding("head.weight", "error"), finding("blocks.1", "note")]);
  assert.equal(found.get("net/blocks.3"), "warn");
  assert.equal(found.get("net/blocks"), "warn");
  assert.equal(found.get("net/head"), "error");
  assert.equal(found.get("net/."), "error");
  assert.equal(found.get("net/blocks.2"), undefined);
});

test("what has to be opened for a site to be seen", () => {
  const roots = build(run(blocks(30)), "output");
  const keys = pathTo(roots, "net/blocks.7.attn", new Set());
  assert.ok(visible(roots, new Set(keys)).some((node) => node.site === "blocks.7.attn"));
});

test("names from a model are only ever names", () => {
  const [root] = build(run(["<script>alert(1)</script>", "constructor", "__proto__"]), "output");
  assert.equal(root!.children.length, 3);
});
