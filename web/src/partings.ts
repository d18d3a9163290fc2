// The first difference of each kind of value between two runs, in the order of time.

import type { Apart, Differences } from "./answers.ts";
import { QUANTITIES, type Quantity } from "./state.ts";
import { number } from "./text.ts";

const ORDER = ["input", "output", "loss", "output_grad", "parameter_grad", "update", "parameter"]; // as one follows from the other

/** The first difference of one kind of value. */
export interface Parting { what: string; step: number; model: string | null; site: string | null; statistic: string; a: string; b: string; times: string; apart: Apart | null }

export const quantityOf = (what: string): Quantity => (what === "update" ? "ratio" : (what as Quantity));

/** The first of each kind, in the order of time. */
export function partings({ kinds, loss }: Differences): Parting[] {
  const found: Parting[] = Object.entries(kinds).flatMap(([what, apart]) => {
    if (!apart.first) return [];
    const { model, site, at: [step, statistic, a, b] } = apart.first;
    return [{ what, step, model, site, statistic, a: digits(a, b), b: digits(b, a), times: factor(statistic, a, b), apart }];
  });
  if (loss?.first) found.push({ what: "loss", step: loss.first.step, model: null, site: null, statistic: "", a: digits(loss.first.a, loss.first.b), b: digits(loss.first.b, loss.first.a), times: "", apart: null });
  return found.sort((a, b) => a.step - b.step || ORDER.indexOf(a.what) - ORDER.indexOf(b.what));
}

/** A value with as many digits as tell it from another. */
function digits(value: number | string, other: number | string): string {
  const short = number(value);
  if (typeof value === "string" || short !== number(other)) return short;
  for (let many = 4; many < 15; many++) if (value.toPrecision(many) !== Number(other).toPrecision(many)) return value.toPrecision(many);
  return String(value);
}

function factor(statistic: string, a: number | string, b: number | string): string {
  if (statistic !== "rms" || typeof a === "string" || typeof b === "string" || a <= 0 || b <= 0) return "";
  const times = Math.max(a / b, b / a);
  return times >= 1.01 ? ` (×${number(times)})` : "";
}

export const nameOf = (what: string): string => (what === "loss" ? "loss" : QUANTITIES.find((one) => one.key === quantityOf(what))!.name);
