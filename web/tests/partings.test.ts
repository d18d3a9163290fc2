import { deepEqual, equal } from "node:assert/strict";
import { test } from "node:test";
import { farthest, NOT_FINITE, NOTHING, PER_DECADE, sayApart } from "../src/levels.ts";
import { partings } from "../src/partings.ts";
import { said, together } from "../src/ranks.ts";
import { number } from "../src/text.ts";
import type { Run } from "../src/answers.ts";

const kind = (step: number, statistic: string, a: number | string, b: number | string) =>
  ({ compared: 4, differ: 1, steps: 9, first: { model: "net", site: "a", at: [step, statistic, a, b] as [number, string, number | string, number | string] } });

test("what differs first is told first, and of one step what the rest follows from", () => {
  const found = partings({
    kinds: { parameter: kind(5, "mean", 1, 2), output: kind(5, "rms", 2, 6), output_grad: kind(3, "nan", 0, 1), input: { compared: 1, differ: 0, steps: 9 } },
    loss: { steps: 9, first: { step: 5, a: 1, b: "NaN" } }, share: 1,
  });
  deepEqual(found.map((one) => one.what), ["output_grad", "output", "loss", "parameter"]);
  deepEqual(found.map((one) => one.times), ["", " (×3)", "", ""]);
  equal(found[2]!.b, "NaN");
});

test("two values that differ are told with as many digits as that takes", () => {
  const [one] = partings({ kinds: { output: kind(1, "mean", 0.1234567, 0.1234599) }, loss: null, share: 1 });
  deepEqual([one!.a, one!.b], ["0.123457", "0.123460"]);
});

test("how far apart, in words", () => {
  const told = [0, 200, NOT_FINITE, 32000, NOTHING].map((code) => sayApart(code, number));
  deepEqual(told, ["same, to about 1 %", "×10", "NaN or infinite in one only", "all zero in one only", "not sampled in both"]);
});

test("the scale of differences is not that of what is not finite, or zero", () => {
  equal(farthest([]), PER_DECADE);
  equal(farthest([Int16Array.of(0, NOTHING)]), PER_DECADE);
  equal(farthest([Int16Array.of(0, 10, NOT_FINITE, 32000)]) <= PER_DECADE, true);
  equal(farthest([Int16Array.of(3000)]), 3 * PER_DECADE);
});

test("what several ranks have found alike is one finding", () => {
  const finding = (rank: number, site = "a", step = 1) => ({ rule: "dead", model: "net", site, what: "output", severity: "error", rank, step });
  const run = { rank: 1, ranks: [0, 1, 2], findings: [finding(0), finding(1), finding(2), finding(2, "b"), finding(0, "a", 9)] } as unknown as Run;
  const found = together([0, 1, 2, 3, 4], run);
  deepEqual(found, [{ i: 1, ranks: [0, 1, 2] }, { i: 3, ranks: [2] }, { i: 4, ranks: [0] }]);
  deepEqual(found.map((one) => said(one.ranks, run)), ["all ranks", "rank 2", "rank 0"]);
  equal(said([0], { ...run, ranks: [0] }), "");
});
