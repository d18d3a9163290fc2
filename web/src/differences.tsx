// Where two runs, or two ranks of one, are apart: the first difference of each kind, and a matrix of how far.

import type { Apart, Differences as Told } from "./answers.ts";
import { QUANTITIES, type Quantity } from "./state.ts";
import { counted, number, percent } from "./text.ts";

const ORDER = ["input", "output", "loss", "output_grad", "parameter_grad", "update", "parameter"]; // as one follows from the other

/** The first difference of one kind of value. */
export interface Parting { what: string; step: number; model: string | null; site: string | null; statistic: string; a: string; b: string; times: string; apart: Apart | null }

export const quantityOf = (what: string): Quantity => (what === "update" ? "ratio" : (what as Quantity));

/** The first of each kind, in the order of time. */
export function partings({ kinds, loss }: Told): Parting[] {
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

const nameOf = (what: string): string => (what === "loss" ? "loss" : QUANTITIES.find((one) => one.key === quantityOf(what))!.name);

export function Differences({ told, names, onGo }: { told: Told; names: [string, string]; onGo: (parting: Parting) => void }) {
  const found = partings(told);
  const steps = Math.max(0, told.loss?.steps ?? 0, ...Object.values(told.kinds).map((one) => one.steps));
  const exactly = told.share < 1
    ? <>Sizes to 1 % in all samples, and every statistic in {percent(told.share)} of them: <code>tenterhook compare</code> reads all.</>
    : <>By every statistic that was recorded, beyond rounding.</>;
  if (!steps) return <p class="apart quiet">{names[0]} and {names[1]} have no sampled step in common: with <code>--every N</code> for both, they have.</p>;
  if (!found.length) return <p class="apart quiet"><b class="clean">✔ No difference</b> in {counted(steps, "step")} that both have. {exactly}</p>;
  return (
    <div class="apart">
      <p class="quiet"><b>What differs first</b>, {names[0]} against {names[1]}. {exactly} Colours are how far sizes (RMS) are apart.</p>
      <ol>
        {found.map((one) => (
          <li><button type="button" onClick={() => onGo(one)} title="show it">
            <b>{nameOf(one.what)}</b> from step {one.step.toLocaleString("en-US")}{one.site !== null && <> at <span class="where">{one.site}</span></>}: {one.statistic} {one.a} against {one.b}{one.times}
            {one.apart && <small> · {one.apart.differ} of {counted(one.apart.compared, "site")} differ{one.apart.differ === 1 && "s"}</small>}
          </button></li>
        ))}
      </ol>
    </div>
  );
}
