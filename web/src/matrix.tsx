// Layers × time: the tree of rows on the left, and beside each row its levels. The rows are one canvas.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { useSize, px } from "./data.ts";
import { css, MAGENTA, mixed, painter, type Scale } from "./colours.ts";
import { columns, largest, NOTHING, PER_DECADE, say } from "./levels.ts";
import type { Picture } from "./picture.ts";
import { isOpen, type Node, type Severity } from "./tree.ts";
import { number, power } from "./text.ts";

export const MARKS: Record<Severity, string> = { error: "✖", warn: "▲", note: "●" };

interface Props {
  rows: Node[];
  large: boolean;
  toggled: ReadonlySet<string>;
  pictures: { name: string; picture: Picture }[];
  scale: Scale;
  say?: (code: number, number: (value: number) => string) => string; // a level in words
  note?: (node: Node) => string; // what a row says in the place of its class
  badges: Map<string, Severity>;
  selected: string;
  from: number;
  to: number;
  fit: boolean;
  left: number;
  right: number;
  cursor: number | null;
  onSelect: (node: Node) => void;
  onToggle: (node: Node) => void;
  onHover: (step: number | null) => void;
  onWindow: (from: number, to: number) => void;
  onReset: () => void;
}

const GAP = 10; // between two runs

export function Matrix(props: Props) {
  const { rows, pictures, scale, from, to, fit, left, right, cursor } = props;
  const [ref, { width, height }] = useSize();
  const scroller = useRef<HTMLDivElement | null>(null);
  const canvas = useRef<HTMLCanvasElement | null>(null);
  const [top, setTop] = useState(0);
  const [over, setOver] = useState<{ node: Node; run: number; step: number; x: number; y: number } | null>(null);
  const drag = useRef<{ x: number; run: number } | null>(null);
  const [brush, setBrush] = useState<[number, number] | null>(null);

  const room = Math.floor((height - 4) / Math.max(1, rows.length));
  const line = Math.max(fit ? 2 : 22, Math.min(34, room));
  const first = Math.max(0, Math.floor(top / line) - 2);
  const last = Math.min(rows.length, Math.ceil((top + height) / line) + 2);
  const many = Math.max(1, pictures.length);
  const each = Math.max(10, Math.floor((width - left - right - GAP * (many - 1)) / many));
  const paint = useMemo(() => painter(scale), [scale.low, scale.high, scale.map]);
  const look = document.documentElement.dataset.theme;

  useEffect(() => {
    const board = canvas.current;
    if (!board || width < 60) return;
    const ratio = window.devicePixelRatio || 1;
    const wide = width - left - right;
    board.width = Math.round(wide * ratio);
    board.height = Math.round(height * ratio);
    const pen = board.getContext("2d")!;
    pen.scale(ratio, ratio);
    pen.imageSmoothingEnabled = false;
    const shown = rows.slice(first, last);
    const hatch = hatching(pen);
    pictures.forEach(({ picture }, k) => {
      const x0 = k * (each + GAP);
      const w = Math.round(each * ratio);
      const map = columns(picture.matrix, w, from, to);
      const image = new ImageData(w, Math.max(1, shown.length));
      const pixels = new Uint32Array(image.data.buffer);
      shown.forEach((node, i) => {
        const levels = picture.levels(node);
        if (!levels) return;
        for (let x = 0; x < w; x++) pixels[i * w + x] = map.last[x]! < 0 ? 0 : paint(largest(levels, map.first[x]!, map.last[x]!));
      });
      const strips = new OffscreenCanvas(w, Math.max(1, shown.length));
      strips.getContext("2d")!.putImageData(image, 0, 0);
      const gap = line > 8 ? 2 : line > 4 ? 1 : 0;
      shown.forEach((node, i) => {
        const y = (first + i) * line - top;
        if (picture.levels(node)) {
          pen.fillStyle = hatch;
          pen.fillRect(x0, y + gap / 2, each, line - gap);
        }
        pen.drawImage(strips, 0, i, w, 1, x0, y + gap / 2, each, line - gap);
      });
    });
  }, [width, height, rows, pictures, paint, from, to, first, last, top, line, each, left, right, look]);

  useEffect(() => {
    const at = rows.findIndex((node) => node.key === props.selected);
    const box = scroller.current;
    if (at < 0 || !box) return;
    if (at * line < box.scrollTop) box.scrollTop = at * line - line;
    else if ((at + 1) * line > box.scrollTop + box.clientHeight) box.scrollTop = (at + 2) * line - box.clientHeight;
  }, [props.selected, rows, line]);

  const where = (event: PointerEvent): { node: Node | undefined; run: number; step: number; x: number } => {
    const area = canvas.current!.getBoundingClientRect();
    const x = event.clientX - area.left;
    const run = Math.max(0, Math.min(many - 1, Math.floor(x / (each + GAP))));
    const step = Math.floor(from + ((x - run * (each + GAP)) / each) * (to - from));
    return { node: rows[Math.floor((event.clientY - area.top + top) / line)], run, step: Math.max(from, Math.min(to - 1, step)), x };
  };
  const move = (event: PointerEvent): void => {
    const { node, run, step, x } = where(event);
    if (drag.current) setBrush([Math.min(drag.current.x, x), Math.max(drag.current.x, x)]);
    if (!node) return leave();
    setOver({ node, run, step, x: event.clientX, y: event.clientY });
    props.onHover(step);
  };
  const leave = (): void => {
    setOver(null);
    props.onHover(null);
  };
  const down = (event: PointerEvent): void => {
    if (event.button) return;
    const { run, x } = where(event);
    drag.current = { x, run };
    if (event.pointerType === "mouse") (event.target as Element).setPointerCapture(event.pointerId);
  };
  const up = (event: PointerEvent): void => {
    const begun = drag.current;
    drag.current = null;
    setBrush(null);
    if (!begun) return;
    const { node, x } = where(event);
    if (Math.abs(x - begun.x) < 5) {
      if (node) props.onSelect(node);
      return;
    }
    const at = (px: number): number => from + (Math.max(0, Math.min(each, px - begun.run * (each + GAP))) / each) * (to - from);
    props.onWindow(Math.floor(Math.min(at(x), at(begun.x))), Math.ceil(Math.max(at(x), at(begun.x))));
  };

  const active = rows.some((node) => node.key === props.selected) ? `row-${props.selected}` : undefined;
  return (
    <div class="matrix" ref={ref}>
      <div
        class="scroller" ref={scroller} tabIndex={0} role="tree" aria-label="layers" aria-activedescendant={active}
        onScroll={(event) => setTop((event.target as HTMLElement).scrollTop)}
      >
        <div style={px({ height: rows.length * line, position: "relative" })}>
          <div class="over" style={px({ left, width: Math.max(0, width - left - right), height })}>
            <canvas
              ref={canvas} style={px({ width: Math.max(0, width - left - right), height })}
              onPointerMove={move} onPointerLeave={leave} onPointerDown={down} onPointerUp={up}
              onPointerCancel={() => { drag.current = null; setBrush(null); }} onDblClick={props.onReset}
            />
            {cursor !== null && cursor >= from && cursor < to &&
              pictures.map((_, k) => <i class="cursor" style={px({ left: k * (each + GAP) + ((cursor + 0.5 - from) / (to - from)) * each })} />)}
            {brush && <i class="brush" style={px({ left: brush[0], width: brush[1] - brush[0] })} />}
          </div>
          {rows.slice(first, last).map((node, i) => (
            <Label key={node.key} node={node} y={(first + i) * line} line={line} {...props} />
          ))}
        </div>
      </div>
      <Legend scale={scale} right={right} />
      {over && (
        <div class="tip" style={place(over.x, over.y)}>
          <b>{over.node.times > 1 ? `${over.node.times} blocks` : over.node.site}</b> {over.node.kind}<br />
          step {over.step.toLocaleString("en-US")}: <b>{(props.say ?? say)(pictures[over.run]?.picture.at(over.node, over.step) ?? NOTHING, number)}</b>
          {pictures.length > 1 && <><br />{pictures[over.run]?.name}</>}
        </div>
      )}
    </div>
  );
}

const place = (x: number, y: number) => (x > innerWidth - 240 ? { right: innerWidth - x + 12, top: y + 14 } : { left: x + 12, top: y + 14 });

function Label({ node, y, line, left, note, toggled, large, badges, selected, onSelect, onToggle }: Props & { node: Node; y: number; line: number }) {
  const folds = node.children.length > 0;
  const open = folds && isOpen(node, toggled, large);
  const badge = badges.get(node.key) ?? (node.times > 1 ? worst(node, badges) : undefined);
  const is = node.key === selected;
  return (
    <div
      id={`row-${node.key}`} class={`row${is ? " selected" : ""}`} role="treeitem" aria-selected={is} aria-level={node.depth + 1}
      aria-expanded={folds ? open : undefined} style={px({ top: y, height: line, width: left })} title={node.site} onClick={() => onSelect(node)}
    >
      {line >= 12 && (
        <>
          <span class="fold" style={px({ marginLeft: Math.min(node.depth, 8) * (left < 200 ? 6 : 11) })} onClick={(event) => { if (folds) { event.stopPropagation(); onToggle(node); } }}>
            {folds ? (open ? "▾" : "▸") : ""}
          </span>
          <span class="name">{node.label}</span>
          {node.times > 1 && <span class="times">×{node.times}</span>}
          {note ? <span class="since">{note(node)}</span> : <span class="kind">{node.kind}</span>}
          {badge && <span class={`badge ${badge}`} aria-label={badge}>{MARKS[badge]}</span>}
        </>
      )}
    </div>
  );
}

function worst(node: Node, badges: Map<string, Severity>): Severity | undefined {
  const found = node.children.map((child) => badges.get(child.key));
  return (["error", "warn", "note"] as const).find((severity) => found.includes(severity));
}

function Legend({ scale, right }: { scale: Scale; right: number }) {
  const stops = Array.from({ length: 11 }, (_, i) => css(mixed(scale.map, i / 10))).join();
  const span = (scale.high - scale.low) / PER_DECADE;
  const every = span > 12 ? 4 : span > 5 ? 2 : 1;
  const ticks: [string, number][] = scale.isFactor ? [["same", 0], ...[2, 10, 100, 1000].map((n): [string, number] => [`×${n}`, Math.log10(n) * PER_DECADE])]
    : Array.from({ length: Math.ceil(span) + 2 }, (_, i) => Math.floor(scale.low / PER_DECADE) + i).filter((e) => e % every === 0)
      .flatMap((e) => (span > 1.5 ? [1] : [1, 2, 5]).map((n): [string, number] => [span > 1.5 ? power(e) : number(n * 10 ** e), (e + Math.log10(n)) * PER_DECADE]));
  return (
    <div class="legend" style={px({ width: right })} aria-hidden="true">
      <div class="ramp" style={px({ background: `linear-gradient(to top, ${stops})` })}>
        {ticks.filter(([, code]) => code >= scale.low && code <= scale.high).map(([text, code]) => <span style={px({ bottom: `${(100 * (code - scale.low)) / (scale.high - scale.low)}%` })}>{text}</span>)}
      </div>
      <ul>
        <li><i style={px({ background: css(MAGENTA) })} />{scale.isFactor ? "NaN in one" : "NaN, Inf"}</li>
        {!scale.isFactor && <li><i style={px({ background: "#000" })} />all 0</li>}
        <li><i class="hatched" />{scale.isFactor ? "not in both" : "no value"}</li>
      </ul>
    </div>
  );
}

function hatching(pen: CanvasRenderingContext2D): CanvasPattern | string {
  const tile = new OffscreenCanvas(6, 6);
  const small = tile.getContext("2d")!;
  small.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--hatch");
  small.lineWidth = 1;
  for (const d of [-6, 0, 6]) {
    small.moveTo(d - 1, 7);
    small.lineTo(d + 7, -1);
  }
  small.stroke();
  return pen.createPattern(tile, "repeat") ?? "#8884";
}
