// A chart of lines over steps.

import { useEffect, useRef } from "preact/hooks";
import UPlot from "uplot";
import { useSize, px } from "./data.ts";
import { number } from "./text.ts";

export interface Line { name: string; colour: string; values: (number | null)[]; dash?: number[]; width?: number; scale?: string; fill?: [number, string] }
interface Props {
  steps: number[];
  lines: Line[];
  from: number;
  to: number;
  height: number;
  left: number;
  right: number;
  log?: boolean;
  bands?: [number, number, string][];
  onWindow?: (from: number, to: number) => void;
  onReset?: () => void;
  onHover?: (step: number | null) => void;
  cursor?: number | null;
  label: string;
}

export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const isPower = (value: number): boolean => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;

export function Chart(props: Props) {
  const [ref, { width }] = useSize();
  const box = useRef<HTMLDivElement | null>(null);
  const chart = useRef<UPlot | null>(null);
  const now = useRef(props);
  now.current = props;
  const { steps, lines, from, to, height, left, right, log, bands } = props;
  const look = document.documentElement.dataset.theme;

  useEffect(() => {
    if (!box.current || width < 40) return;
    const grid = { stroke: colour("--line"), width: 1 };
    const ticks = { show: false };
    const axis = { stroke: colour("--faint"), font: "11px system-ui", grid, ticks };
    const scales = [...new Set(lines.map((line) => line.scale ?? "y"))];
    const made = new UPlot({
      width, height,
      padding: [8, right && scales.length < 2 ? right : 0, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: Boolean(props.onWindow), y: false, setScale: false }, points: { size: 5 }, y: false },
      scales: {
        x: { time: false, range: () => [now.current.from, Math.max(now.current.to, now.current.from + 1)] },
        ...Object.fromEntries(scales.map((name) => [name, log && name === "y" ? { distr: 3 as const } : {}])),
      },
      axes: [
        { ...axis, size: 22, gap: 3, space: 70, values: (_, at) => at.map((v) => (Number.isInteger(v) ? v.toLocaleString("en-US") : "")) },
        ...scales.map((scale, i) => ({
          ...axis, scale, side: i ? (1 as const) : (3 as const), size: i ? right : left, gap: 4, space: 26,
          grid: i ? { show: false } : { ...grid, filter: (_: UPlot, at: number[]) => at.map((v) => (log && !isPower(v) ? null : v)) },
          values: (_: UPlot, at: (number | null)[]) => at.map((v) => (v === null ? "" : number(v))),
          ...(i ? { stroke: colour("--rate") } : {}),
        })),
      ],
      series: [
        {},
        ...lines.map((line) => ({
          label: line.name, scale: line.scale ?? "y", stroke: line.colour, width: line.width ?? 1.5, spanGaps: true,
          points: { show: steps.length < 3 }, ...(line.dash ? { dash: line.dash } : {}),
        })),
      ],
      bands: (bands ?? []).map(([a, b, fill]) => ({ series: [a, b] as [number, number], fill })),
      hooks: {
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const [a, b] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          now.current.onWindow?.(Math.max(0, Math.round(a)), Math.round(b));
        }],
        setCursor: [(u) => {
          const x = u.cursor.left ?? -1;
          if ((u.cursor as { event?: unknown }).event) now.current.onHover?.(x < 0 ? null : Math.round(u.posToVal(x, "x")));
        }],
      },
    }, [steps, ...lines.map((line) => line.values)] as UPlot.AlignedData, box.current);
    chart.current = made;
    made.over.ondblclick = () => now.current.onReset?.();
    return () => {
      made.destroy();
      chart.current = null;
    };
  }, [width, height, left, right, steps, lines, from, to, log, look]);

  useEffect(() => {
    const u = chart.current;
    if (!u) return;
    const at = props.cursor;
    u.setCursor(at === null || at === undefined ? { left: -10, top: -10 } : { left: u.valToPos(at, "x"), top: 10 }, false);
  }, [props.cursor]);

  return (
    <div class="chart" ref={ref} style={px({ height })} role="img" aria-label={props.label}>
      <div ref={box} />
    </div>
  );
}
