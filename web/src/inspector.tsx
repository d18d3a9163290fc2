// The selected site: what is known about it, its series, and its histograms over time.

import { useEffect, useMemo, useRef } from "preact/hooks";
import { loadJson, type Details, type Finding, type Run, type Values, type Where } from "./answers.ts";
import { Chart, colour, type Line } from "./chart.tsx";
import { mixed } from "./colours.ts";
import { useAnswer, useSize, px } from "./data.ts";
import { Evidence } from "./story.tsx";
import { key, type Node } from "./tree.ts";
import { number, percent } from "./text.ts";

interface Props { node: Node; run: Run; where: Where; from: number; to: number; revision: number; onSource: () => void; onClose: () => void }

const [LEFT, RIGHT] = [44, 14]; // beside a chart and the histogram below it
const NAMES: Record<string, string> = {
  input: "input", output: "output", output_grad: "gradient at the output", parameter: "weight", parameter_grad: "gradient", update: "update",
};

export function Inspector({ node, run, where, from, to, revision, onSource, onClose }: Props) {
  const window = { from: Math.floor(from), to: Math.ceil(to) - 1, columns: 80 };
  const asked = useAnswer<Details>(
    () => loadJson(`site/${node.model}/${node.site}`, where, window), [node.key, where.run, where.rank, window.from, window.to, revision],
  );
  const module = run.models.find((one) => one.name === node.model)?.modules.find((one) => one.site === node.site);
  const findings = run.findings.filter((one: Finding) => (one.rank ?? run.rank) === run.rank && key(one.model ?? "", one.site ?? "") === key(node.model, node.site));
  const kinds = Object.entries(asked.data?.kinds ?? {}).sort(([a], [b]) => order(a) - order(b));
  const dtypes = [...new Set(run.places.filter((p) => p[0] === node.model && p[1] === node.site && p[3]).map((p) => p[3]))];
  const shapes = Object.entries(module?.shapes ?? {});
  return (
    <section class="inspector" aria-label={`site ${node.site}`}>
      <h2><span class="site">{node.site}</span> <small>{node.kind}{node.times > 1 ? ` ×${node.times}` : ""}</small><button type="button" class="close" aria-label="close" onClick={onClose}>×</button></h2>
      <p class="facts">
        {node.model}{dtypes.length > 0 && ` · ${dtypes.join(", ")}`}
        {shapes.map(([name, shape]) => <> · {name} {shape.join("×")}</>)}
        {" · "}<button type="button" class="link" onClick={onSource}>source</button>
      </p>
      {node.times > 1 && <p class="quiet">{node.times} blocks that are built alike: the row shows the largest of them. Open it (→) to see each. What follows is the first.</p>}
      {findings.map((finding) => <Evidence finding={finding} />)}
      {asked.error && <p class="error">{asked.error}</p>}
      {!asked.error && !kinds.length && (asked.data ? (
        <p class="quiet">Nothing was measured here in these steps{node.children.length ? "; what is below it may have been" : ""}. Reset the window (0), or record with <code>--sites</code> that include it.</p>
      ) : <p class="quiet">reading …</p>)}
      {kinds.length > 0 && <p class="facts"><b>blue line</b>: RMS, grey line: largest value. Below, where the values are, by sign and size: the {document.documentElement.dataset.theme === "dark" ? "brighter" : "darker"}, the more.</p>}
      {kinds.map(([what, values]) => <Kind key={what} what={what} values={values} from={from} to={to} />)}
      {asked.data && asked.data.share < 1 && <p class="quiet">Histograms are of {percent(asked.data.share)} of the batches in these steps. Zoom in for all of them.</p>}
    </section>
  );
}

const order = (what: string): number => Object.keys(NAMES).indexOf(what);
const sum = (values: number[]): number => values.reduce((a, b) => a + b, 0);

function Kind({ what, values, from, to }: { what: string; values: Values; from: number; to: number }) {
  const look = document.documentElement.dataset.theme;
  const lines = useMemo<Line[]>(() => [
    { name: "largest", colour: colour("--faint"), values: positive(values.absmax), width: 1 },
    { name: "rms", colour: colour("--accent"), values: positive(values.rms), width: 2 },
  ], [values, look]);
  const last = values.step.length - 1;
  const bad = [["NaN", sum(values.nan)], ["+Inf", sum(values.pos_inf)], ["−Inf", sum(values.neg_inf)]].filter(([, many]) => many);
  return (
    <div class="kindbox" data-kind={what}>
      <h3>{NAMES[what] ?? what} <small>{values.count.toLocaleString("en-US")} values</small></h3>
      {bad.length > 0 && <p class="error">not finite: {bad.map(([name, many]) => `${many} ${name}`).join(", ")}</p>}
      <Chart steps={values.step} lines={lines} from={from} to={to} height={84} left={LEFT} right={RIGHT} log label={`rms and largest value of ${what} over time`} />
      <Histogram values={values} from={from} to={to} label={`histogram of ${what} over time`} />
      <dl>
        {([["mean", values.mean[last]], ["std", values.std[last]], ["min", values.min[last]], ["max", values.max[last]]] as const).map(([name, value]) => <div><dt>{name}</dt><dd>{number(value)}</dd></div>)}
        <div><dt>zeros</dt><dd>{percent(values.zeros[last] ?? 0)}</dd></div>
        {values.dead && <div><dt>dead units</dt><dd>{share(values.dead)}</dd></div>}
        {values.saturated && <div><dt>saturated</dt><dd>{share(values.saturated)}</dd></div>}
      </dl>
    </div>
  );
}

const positive = (row: (number | null)[]): (number | null)[] => row.map((v) => (v !== null && v > 0 ? v : null));
const share = (row: (number | null)[]): string => {
  const last = row.filter((v) => v !== null).pop();
  return last === undefined || last === null ? "–" : percent(last);
};

/** Values by sign and power of two over time: large positive ones at the top, large negative ones at the bottom. */
function Histogram({ values, from, to, label }: { values: Values; from: number; to: number; label: string }) {
  const [ref, { width }] = useSize();
  const canvas = useRef<HTMLCanvasElement | null>(null);
  const height = 92;
  const look = document.documentElement.dataset.theme;
  const bins = values.shares[0]?.length ?? 0;
  useEffect(() => {
    const board = canvas.current;
    const wide = width - LEFT - RIGHT;
    if (!board || wide < 20 || !bins) return;
    const ratio = devicePixelRatio || 1;
    board.width = wide * ratio;
    board.height = height * ratio;
    const pen = board.getContext("2d")!;
    pen.scale(ratio, ratio);
    const x = (step: number): number => ((step - from) / Math.max(1, to - from)) * wide;
    const y = (bin: number): number => height * (1 - bin / bins);
    const dark = look === "dark";
    values.shares.forEach((shares, i) => {
      const begin = x(values.step[i]!);
      const end = x(values.step[i + 1] ?? values.end);
      shares.forEach((share, bin) => {
        if (!share) return;
        const [r, g, b] = mixed("size", dark ? 0.12 + 0.88 * Math.sqrt(share / 130) : 0.86 - 0.86 * Math.sqrt(share / 130));
        pen.fillStyle = `rgb(${r} ${g} ${b})`;
        pen.fillRect(begin, y(bin + 1), Math.max(1, end - begin + 0.5), height / bins + 0.5);
      });
    });
    pen.fillStyle = colour("--faint");
    pen.fillRect(0, y((bins - 1) / 2 + 0.5), wide, 1);
  }, [values, width, from, to, bins, look]);
  if (!bins) return null;
  const size = (e: number): string => number(Number((2 ** e).toPrecision(2)));
  return (
    <div class="histogram" ref={ref} style={px({ height })} role="img" aria-label={label}>
      <span style={px({ top: 0 })}>{size(values.high + 1)}</span>
      <span style={px({ top: "calc(50% - .6em)" })}>0</span>
      <span style={px({ bottom: 0 })}>−{size(values.high + 1)}</span>
      <canvas ref={canvas} style={px({ left: LEFT, width: Math.max(0, width - LEFT - RIGHT), height })} />
    </div>
  );
}
