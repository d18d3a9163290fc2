import assert from "node:assert/strict";
import { test } from "node:test";
import { mixed, painter, MAGENTA } from "../src/colours.ts";
import { NOT_FINITE, NOTHING, ZERO } from "../src/levels.ts";
import { counted, many, number, percent, power } from "../src/text.ts";

test("numbers are short", () => {
  assert.deepEqual([0, 0.01234, 1.2e-5, 4500, 123456, -2.5, null, "NaN"].map(number), ["0", "0.0123", "1.2e-5", "4,500", "1.2e5", "-2.5", "–", "NaN"]);
  assert.deepEqual([power(-12), power(0), power(3)], ["10⁻¹²", "10⁰", "10³"]);
  assert.deepEqual([many(38314), many(124e6), many(0)], ["38.3 k", "124 M", ""]);
  assert.deepEqual([counted(1, "step"), counted(2000, "step")], ["1 step", "2,000 steps"]);
  assert.deepEqual([percent(0.012), percent(0.96)], ["1.2 %", "96 %"]);
});

test("colours get lighter with size, and what is no number has its own", () => {
  const light = (share: number): number => mixed("size", share).reduce((a, b) => a + b);
  for (let i = 0; i < 10; i++) assert.ok(light((i + 1) / 10) > light(i / 10));
  const paint = painter({ low: 0, high: 100, map: "size" });
  assert.equal(paint(NOTHING), 0);
  assert.equal(paint(ZERO), 0xff000000);
  assert.equal(paint(NOT_FINITE) & 255, MAGENTA[0]);
  assert.equal(paint(-500), paint(0));
  assert.equal(paint(5000), paint(100));
});
