// Where two runs, or two ranks of one, are apart: the first difference of each kind. Below it is a matrix of how far.

import type { Differences as Told } from "./answers.ts";
import { nameOf, partings, type Parting } from "./partings.ts";
import { counted, percent } from "./text.ts";

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
