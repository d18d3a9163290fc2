// Levels: 200 × log10 of the RMS, in 16 bits. The larger of two is what both together show.

import type { First } from "./answers.ts";

export const PER_DECADE = 200;
export const NOTHING = -32768; // not sampled
export const ZERO = -32767;
export const NOT_FINITE = 32767;

const ZERO_IN_ONE = 32000; // the highest level that is a number

export interface Matrix {
  what: string;
  places: number[]; // numbers of places, as in the run
  steps: number[]; // that each column begins with
  end: number; // the step after the last column
  codes: Int16Array; // a row for each place
  first?: (First | null)[]; // of differences: where each place begins to differ
}

export function decode(data: ArrayBuffer): Matrix {
  const line = new Uint8Array(data).indexOf(10);
  const head = JSON.parse(new TextDecoder().decode(data.slice(0, line))) as Omit<Matrix, "codes">;
  const many = head.places.length * head.steps.length;
  return { ...head, codes: new Int16Array(data.slice(line + 1, line + 1 + 2 * many)) };
}

export function row(matrix: Matrix, index: number): Int16Array {
  const many = matrix.steps.length;
  return matrix.codes.subarray(index * many, (index + 1) * many);
}

/** What several rows show together. */
export function together(rows: Int16Array[], many: number): Int16Array {
  if (rows.length === 1) return rows[0]!;
  const found = new Int16Array(many).fill(NOTHING);
  for (const one of rows) for (let i = 0; i < many; i++) if (one[i]! > found[i]!) found[i] = one[i]!;
  return found;
}

/** The level of a quotient. */
export function quotient(above: Int16Array, below: Int16Array): Int16Array {
  const found = new Int16Array(above.length);
  for (let i = 0; i < found.length; i++) {
    const [a, b] = [above[i]!, below[i] ?? NOTHING];
    if (a === NOTHING || b === NOTHING) found[i] = NOTHING;
    else if (a === NOT_FINITE || b === NOT_FINITE) found[i] = NOT_FINITE;
    else if (a === ZERO) found[i] = ZERO;
    else found[i] = b === ZERO ? 32000 : Math.max(-32000, Math.min(32000, a - b));
  }
  return found;
}

export const isNumber = (code: number): boolean => code > ZERO && code < NOT_FINITE;
export const value = (code: number): number => 10 ** (code / PER_DECADE);

/** A level in words. */
export function say(code: number, number: (value: number) => string): string {
  if (code === NOTHING) return "not sampled";
  if (code === ZERO) return "all zero";
  if (code === NOT_FINITE) return "NaN or infinite";
  return number(value(code));
}

/** How far two values are apart, in words. */
export function sayApart(code: number, number: (value: number) => string): string {
  if (code === NOTHING) return "not sampled in both";
  if (code === NOT_FINITE) return "NaN or infinite in one only";
  if (code >= ZERO_IN_ONE) return "all zero in one only";
  return code > 0 ? `×${number(value(code))}` : "same, to about 1 %";
}

/** The scale of differences: from the same to nearly the largest. */
export function farthest(rows: Int16Array[]): number {
  const known = rows.map((row) => row.filter((code) => code > 0 && code < ZERO_IN_ONE));
  return known.some((row) => row.length) ? Math.max(PER_DECADE / 3, Math.min(3 * PER_DECADE, range(known)[1])) : PER_DECADE;
}

/** The levels between which nearly all are; at least one decade. */
export function range(rows: Int16Array[]): [low: number, high: number] {
  const counts = new Map<number, number>();
  let total = 0;
  for (const one of rows)
    for (let i = 0; i < one.length; i++) {
      const code = one[i]!;
      if (!isNumber(code)) continue;
      counts.set(code, (counts.get(code) ?? 0) + 1);
      total++;
    }
  if (!total) return [-2 * PER_DECADE, 0];
  const known = [...counts.keys()].sort((a, b) => a - b);
  const at = (share: number): number => {
    let left = share * total;
    for (const code of known) if ((left -= counts.get(code)!) <= 0) return code;
    return known[known.length - 1]!;
  };
  const [low, high] = [at(0.01), at(0.99)];
  const more = Math.max(0, PER_DECADE - (high - low)) / 2;
  return [Math.floor(low - more), Math.ceil(high + more)];
}

/** For each pixel, the first and the last column that it shows; -1 where there is none. */
export function columns(matrix: Matrix, width: number, from: number, to: number): { first: Int32Array; last: Int32Array } {
  const [first, last] = [new Int32Array(width).fill(-1), new Int32Array(width).fill(-1)];
  let at = -1; // the last column that begins before
  for (let x = 0; x < width; x++) {
    const begin = from + (x / width) * (to - from);
    const end = from + ((x + 1) / width) * (to - from);
    while (at + 1 < matrix.steps.length && matrix.steps[at + 1]! <= begin) at++;
    const left = at;
    while (at + 1 < matrix.steps.length && matrix.steps[at + 1]! < end) at++;
    if (begin >= matrix.end || at < 0) continue;
    first[x] = Math.max(0, left);
    last[x] = at;
  }
  return { first, last };
}

/** What a pixel shows of a row: the largest, so that a single NaN among thousands of samples is seen. */
export function largest(row: Int16Array, first: number, last: number): number {
  let found = NOTHING;
  for (let i = first; i <= last; i++) if (row[i]! > found) found = row[i]!;
  return found;
}
