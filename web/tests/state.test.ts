import assert from "node:assert/strict";
import { test } from "node:test";
import { read, START, write, type State } from "../src/state.ts";

test("the address has the whole state, and nothing at the start", () => {
  assert.equal(write(START), "");
  const state: State = {
    run: "20261119T1-train", other: "b & c", rank: 3, otherRank: 0, tab: "depth", show: "ratio", from: 10, to: 200, site: "net/<script>.0:in[0]",
    toggled: ["net/a", "net/b=1&x"], find: "attn #1", fit: true, theme: "dark",
  };
  assert.deepEqual(read(`#${write(state)}`), state);
});

test("what makes no sense is as at the start", () => {
  assert.deepEqual(read("#tab=%3Cscript%3E&show=nothing&from=-1&to=1e9&rank=x&theme=pink&fold="), START);
  assert.deepEqual(read("#%E0%A4%A"), START);
});

test("a window that is upside down is turned round", () => {
  const { from, to } = read("#from=9&to=3");
  assert.deepEqual([from, to], [3, 9]);
});
