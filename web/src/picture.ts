// One run's levels for the rows of the tree.

import { load, type First, type Run, type Where, type Window } from "./answers.ts";
import { decode, NOTHING, quotient, row, together, type Matrix } from "./levels.ts";
import type { Quantity } from "./state.ts";
import { kindsOf, type Node } from "./tree.ts";

export class Picture {
  #own = new Map<string, number>(); // site → row of the first matrix
  #below = new Map<string, number>(); // of the matrix that the first is divided by
  #known = new Map<string, Int16Array | null>();
  readonly run: Run;
  readonly matrix: Matrix;
  readonly divisor: Matrix | null;
  readonly #model: string | null; // the only one: it may have another name in another run

  constructor(run: Run, matrices: Matrix[]) {
    this.run = run;
    this.matrix = matrices[0]!;
    this.divisor = matrices[1] ?? null;
    const names = new Set(run.places.map((place) => place[0]));
    this.#model = names.size === 1 ? [...names][0]! : null;
    const index = (matrix: Matrix, into: Map<string, number>): void =>
      matrix.places.forEach((place, i) => {
        const known = run.places[place];
        if (known) into.set(`${known[0]}/${known[1]}`, i);
      });
    index(this.matrix, this.#own);
    if (this.divisor) index(this.divisor, this.#below);
  }

  /** The levels of a row: its own, else those of all below it; null where there are none. */
  levels(node: Node): Int16Array | null {
    const known = this.#known.get(node.key);
    if (known !== undefined) return known;
    let found = node.times === 1 ? this.own(node) : null;
    if (!found) {
      const rows = node.children.map((child) => this.levels(child)).filter((one) => one !== null);
      found = rows.length ? together(rows, this.matrix.steps.length) : null;
    }
    this.#known.set(node.key, found);
    return found;
  }

  /** Those that were measured there itself. */
  own(node: Node): Int16Array | null {
    const at = `${this.#model ?? node.model}/${node.site}`;
    const i = this.#own.get(at);
    if (i === undefined) return null;
    if (!this.divisor) return row(this.matrix, i);
    const below = this.#below.get(at);
    return below === undefined ? null : quotient(row(this.matrix, i), row(this.divisor, below));
  }

  /** Of differences: where this one begins to differ. */
  protected firstOf(node: Node): First | null {
    return this.matrix.first?.[this.#own.get(`${this.#model ?? node.model}/${node.site}`) ?? -1] ?? null;
  }

  at(node: Node, step: number): number {
    const levels = this.levels(node);
    const { steps, end } = this.matrix;
    let [low, high] = [0, steps.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle]! <= step) low = middle + 1;
      else high = middle;
    }
    return levels && low && step < end ? levels[low - 1]! : NOTHING;
  }
}

/** How far the levels of two runs are apart. */
export class Apart extends Picture {
  /** The first difference of a row, or of what is below it. */
  first(node: Node): First | null {
    const own = node.times === 1 ? this.firstOf(node) : null;
    return [own, ...node.children.map((child) => this.first(child))].reduce((a, b) => (a && b ? (b[0] < a[0] ? b : a) : (a ?? b)), null);
  }
}

export async function differences(run: Run, where: Where, other: Where, show: Quantity, window: Window): Promise<Apart> {
  const kind = show === "ratio" ? "update" : show;
  return new Apart(run, [decode(await load(`differences/${kind}`, where, window, other))]);
}

export async function picture(run: Run, where: Where, show: Quantity, window: Window): Promise<Picture> {
  const kinds = kindsOf(show);
  return new Picture(run, await Promise.all(kinds.map(async (kind) => decode(await load(`matrix/${kind}`, where, window)))));
}
