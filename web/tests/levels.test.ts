import assert from "node:assert/strict";
import { test } from "node:test";
import { columns, decode, largest, NOT_FINITE, NOTHING, PER_DECADE, quotient, range, row, say, together, ZERO, type Matrix } from "../src/levels.ts";

const codes = (...values: number[]): Int16Array => Int16Array.from(values);
const matrix = (steps: number[], end: number): Matrix => ({ what: "output", places: [], steps, end, codes: codes() });

test("a matrix is a line of JSON and its numbers, whose first byte is even", () => {
  const head = '{"what":"output","places":[4,7],"steps":[0,10],"end":20}';
  const text = head + " ".repeat((head.length + 1) % 2) + "\n";
  const data = new Uint8Array(text.length + 8);
  data.set(new TextEncoder().encode(text));
  new Int16Array(data.buffer, text.length).set([1, -2, NOT_FINITE, NOTHING]);
  const found = decode(data.buffer);
  assert.deepEqual(found.places, [4, 7]);
  assert.deepEqual([...row(found, 0)], [1, -2]);
  assert.deepEqual([...row(found, 1)], [NOT_FINITE, NOTHING]);
});

test("several rows together show the largest, and zeros and nothing only where all do", () => {
  assert.deepEqual([...together([codes(1, ZERO, NOTHING, 5), codes(2, ZERO, ZERO, NOT_FINITE)], 4)], [2, ZERO, ZERO, NOT_FINITE]);
  assert.deepEqual([...together([], 2)], [NOTHING, NOTHING]);
});

test("a quotient is a difference, and what is no number stays that", () => {
  const above = codes(-600, NOTHING, NOT_FINITE, ZERO, 100, 100);
  const below = codes(0, 0, 0, 0, ZERO, NOT_FINITE);
  assert.deepEqual([...quotient(above, below)], [-600, NOTHING, NOT_FINITE, ZERO, 32000, NOT_FINITE]);
});

test("levels in words", () => {
  assert.equal(say(-3 * PER_DECADE, String), "0.001");
  assert.deepEqual([NOTHING, ZERO, NOT_FINITE].map((code) => say(code, String)), ["not sampled", "all zero", "NaN or infinite"]);
});

test("the range leaves out what is no number and the outermost hundredth, and is a decade at least", () => {
  assert.deepEqual(range([codes(ZERO, NOTHING, NOT_FINITE)]), [-400, 0]);
  const [low, high] = range([codes(...Array(500).fill(0), ...Array(500).fill(600), 30000)]);
  assert.ok(low >= -5 && high <= 605);
  const [a, b] = range([codes(100, 101)]);
  assert.ok(b - a >= PER_DECADE);
});

test("every column is in some pixel, however many there are", () => {
  const steps = Array.from({ length: 1000 }, (_, i) => 10 * i);
  const { first, last } = columns(matrix(steps, 10000), 300, 0, 10000);
  const seen = new Set<number>();
  for (let x = 0; x < 300; x++) for (let i = first[x]!; i <= last[x]!; i++) seen.add(i);
  assert.equal(seen.size, 1000);
  const values = new Int16Array(1000);
  values[777] = NOT_FINITE;
  assert.ok([...first].some((_, x) => largest(values, first[x]!, last[x]!) === NOT_FINITE));
});

test("a sample is shown until the next one, and nothing before the first and after the end", () => {
  const { first, last } = columns(matrix([2, 6], 8), 10, 0, 10);
  assert.deepEqual([...last], [-1, -1, 0, 0, 0, 0, 1, 1, -1, -1]);
  assert.deepEqual([...first], [...last]);
});
