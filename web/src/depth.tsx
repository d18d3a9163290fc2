// How large values are from the first layer to the last: the median over the window, and where 90 % of it lies.

import { useSize, px } from "./data.ts";
import { isNumber, PER_DECADE, value } from "./levels.ts";
import type { Picture } from "./picture.ts";
import { QUANTITIES, type Quantity } from "./state.ts";
import { number, power } from "./text.ts";
import { all, type Node } from "./tree.ts";

interface Props { roots: Node[]; pictures: { name: string; picture: Picture }[]; show: Quantity; from: number; to: number; selected: string; onSelect: (node: Node) => void }
interface Point { node: Node; low: number; middle: number; high: number }

export function points(roots: Node[], picture: Picture, from: number, to: number): Point[] {
  const { steps, end } = picture.matrix;
  const inside = steps.map((step, i) => (steps[i + 1] ?? end) > from && step < to);
  const layers = all(roots).filter((node) => node.times === 1 && !node.children.length && picture.own(node));
  return layers.flatMap((node) => {
    const codes = [...picture.own(node)!].filter((code, i) => inside[i] && isNumber(code)).sort((a, b) => a - b);
    const at = (share: number): number => codes[Math.min(codes.length - 1, Math.floor(share * codes.length))]!;
    return codes.length ? [{ node, low: at(0.05), middle: at(0.5), high: at(0.95) }] : [];
  });
}

const COLOURS = ["var(--accent)", "var(--second)"];

export function Depth({ roots, pictures, show, from, to, selected, onSelect }: Props) {
  const [ref, { width, height }] = useSize();
  const series = pictures.map(({ picture }) => points(roots, picture, from, to));
  const nodes = [...new Map(series.flat().map((point) => [point.node.key, point.node])).values()].sort((a, b) => a.order - b.order);
  const about = QUANTITIES.find((one) => one.key === show)!;
  if (!nodes.length)
    return <div class="empty" ref={ref}><p>No {about.name} were measured in these steps.</p><p>Press <kbd>0</kbd> for the whole run, or record them with <code>--what</code>.</p></div>;
  const codes = series.flat().flatMap((point) => [point.low, point.high]);
  const guide = about.guide ? Math.log10(about.guide) * PER_DECADE : null;
  const low = Math.floor(Math.min(...codes) / PER_DECADE) - 0.2;
  const high = Math.ceil(Math.max(...codes) / PER_DECADE) + 0.2;
  const [left, right, top, bottom] = [52, 16, 14, 116];
  const x = (i: number): number => left + ((i + 0.5) / nodes.length) * (width - left - right);
  const y = (code: number): number => top + ((high - code / PER_DECADE) / (high - low)) * (height - top - bottom);
  const index = new Map(nodes.map((node, i) => [node.key, i]));
  const every = Math.ceil((nodes.length * 13) / Math.max(1, width - left - right));
  const decades = Array.from({ length: Math.floor(high) - Math.ceil(low) + 1 }, (_, i) => Math.ceil(low) + i);
  const labelled = Math.ceil(decades.length / Math.max(1, Math.floor((height - bottom) / 26)));
  return (
    <div class="depth" ref={ref}>
      <svg width={width} height={height} role="img" aria-label={`${about.name} over depth`}>
        {decades.map((e) => (
          <g><line class="grid" x1={left} x2={width - right} y1={y(e * PER_DECADE)} y2={y(e * PER_DECADE)} />
            {e % labelled === 0 && <text x={left - 6} y={y(e * PER_DECADE) + 4} text-anchor="end">{power(e)}</text>}</g>
        ))}
        {guide !== null && guide / PER_DECADE > low && guide / PER_DECADE < high && (
          <g><line class="guide" x1={left} x2={width - right} y1={y(guide)} y2={y(guide)} />
            <text class="guide" x={width - right} y={y(guide) - 5} text-anchor="end">{show === "ratio" ? "about right: 10⁻³" : "vanishing below 10⁻⁷"}</text></g>
        )}
        {series.map((points, k) => {
          const known = points.filter((p) => index.has(p.node.key)).sort((a, b) => a.node.order - b.node.order);
          const at = (p: Point): number => x(index.get(p.node.key)!);
          const line = (of: "low" | "middle" | "high", list: Point[]): string => list.map((p) => `${at(p)},${y(p[of])}`).join(" ");
          return (
            <g style={px({ color: COLOURS[k] })}>
              <polygon class="band" points={`${line("high", known)} ${line("low", [...known].reverse())}`} />
              <polyline class="median" points={line("middle", known)} />
              {known.map((p) => (
                <circle class={p.node.key === selected ? "selected" : ""} cx={at(p)} cy={y(p.middle)} r={nodes.length > 200 ? 2 : 4} onClick={() => onSelect(p.node)}>
                  <title>{`${p.node.site}: ${number(value(p.middle))} (${number(value(p.low))} to ${number(value(p.high))})`}</title>
                </circle>
              ))}
            </g>
          );
        })}
        <text x={left} y={height - 8}>line: median of these steps · band: where 90 % of them are</text>
        {nodes.map((node, i) => i % every === 0 && (
          <text class={`layer${node.key === selected ? " selected" : ""}`} transform={`translate(${x(i) + 3} ${height - bottom + 10}) rotate(-55)`} text-anchor="end" onClick={() => onSelect(node)}>
            {node.site.length > 22 ? `…${node.site.slice(-21)}` : node.site}
          </text>
        ))}
      </svg>
    </div>
  );
}
